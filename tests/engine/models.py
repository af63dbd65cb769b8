"""Tiny models as folders that vLLM can load: its attention wants heads of 32 numbers and more, unlike those of the other tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.tiny_models import _randomise
from support.tiny_tokenizer import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 64, "n_inner": 96, "n_layer": 3, "n_head": 2, "n_positions": 512}
#: What each family takes beside the sizes; ``None`` leaves a size out.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 32},
    "cohere": {"logit_scale": 0.25},
    "gpt2": GPT2,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "stablelm": {},
    "gpt_neox": {},
    "bloom": {"n_layer": 3, "n_head": 2},
    "phi": {},
    "olmo2": {},
    "gemma3_text": {"query_pre_attn_scalar": 32},
    "mixtral": {"num_local_experts": 4},
}


def save(family: str, folder: Path, **options: Any) -> Path:
    """A model of this family with random weights, all of which matter, and its tokenizer."""
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **options}, dtype="float32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomise(model, 0)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
