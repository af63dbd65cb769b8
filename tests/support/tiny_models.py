"""Tiny random causal language models, one for every family that `AutoModelForCausalLM` knows.

The mapping of transformers holds close to two hundred model types. A configuration for each, written by
hand, would be long and would rot with every release, so it is derived: the family's own default configuration
is read, every attribute with a well known name is replaced by a small value (`_SIZES`), lists that name the
kind of each layer are shortened so that each kind still occurs, token ids are moved into the small
vocabulary, and what is left to say about single families stands in `_OVERRIDES`.

Two properties matter to the tests that use these models:

* Every constant that scales or caps something on the way from the embedding to the logits is set to a value
  that clearly changes the result (`_VISIBLE`). A default of 1.0 or None would hide a tool that forgets it.
* All weights are random (`_randomise`). Freshly initialised transformers have biases of zero and norm weights
  of one, so a tool that leaves out a bias or a norm weight would still appear to be right.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, SiglipVisionConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

VOCAB_SIZE = 256
HIDDEN_SIZE = 32
NUM_LAYERS = 3
NUM_HEADS = 4
NUM_KV_HEADS = 2
# Twice hidden_size / heads: the width of the attention output differs from that of the residual, as in Qwen3.
HEAD_DIM = 16
MAX_POSITIONS = 160
# Short enough that the inputs of the tests (about seven tokens) run out of the window.
WINDOW = 4

# Ids below this one are given to special tokens; `tiny_inputs` draws from the ids above.
FIRST_ORDINARY_ID = 16


def _table(*groups: tuple[Any, str]) -> dict[str, Any]:
    """Turn (value, "name name name") groups into one name -> value table."""
    return {name: value for value, names in groups for name in names.split()}


# Attribute name -> tiny value. Applied to a configuration and to all its sub-configurations where the
# attribute exists and is not None (None means "derive it" or "this feature is off").
_SIZES: dict[str, Any] = _table(
    (
        VOCAB_SIZE,
        "vocab_size vocab_size_per_layer_input audio_vocab_size decoder_vocab_size shape_vocab_size "
        "pronunciation_vocab_size",
    ),
    (
        HIDDEN_SIZE,
        "hidden_size d_model n_embd emb_dim embedding_dim word_embed_proj_dim lru_width "
        "backbone_hidden_size hidden_size_global input_size out_hidden_size adapter_in_dim "
        "adapter_out_dim adapter_input_size vision_output_dim output_channels router_hidden_size",
    ),
    (1, "encoder_layers num_encoder_layers depth num_global_layers conf_num_hidden_layers"),
    (
        NUM_HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads attention_heads "
        "swa_num_attention_heads linear_num_value_heads mamba_num_heads mamba_n_heads n_mamba_heads",
    ),
    (
        NUM_KV_HEADS,
        "num_key_value_heads num_kv_heads kv_n_heads linear_num_key_heads swa_num_key_value_heads "
        "index_n_heads mamba_n_groups mamba_ngroups n_groups o_groups",
    ),
    (
        HEAD_DIM,
        "head_dim swa_head_dim index_head_dim mamba_head_dim dim_head kv_channels attention_head_size",
    ),
    (
        64,
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size feed_forward_size "
        "d_inner dff dim_ff intermediate_size_mlp mlp_dim dense_intermediate_size",
    ),
    (
        24,
        "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size "
        "shared_intermediate_size shared_experts_intermediate_size moe_shared_expert_intermediate_size",
    ),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (
        2,
        "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k zero_expert_num hc_count hc_mult",
    ),
    (
        1,
        "n_group topk_group num_expert_group first_k_dense_replace num_dense_layers n_shared_experts "
        "num_shared_experts moe_num_shared_experts",
    ),
    (
        MAX_POSITIONS,
        "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length "
        "max_source_positions model_max_length original_max_position_embeddings",
    ),
    (
        WINDOW,
        "sliding_window sliding_window_size attention_window_size window_size attention_chunk_size "
        "index_topk local_attention_window_len block_size mamba_chunk_size keep_window_size rel_extent",
    ),
    (12, "q_lora_rank"),
    (
        8,
        "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim "
        "linear_value_head_dim linear_head_dim mamba_d_state ssm_state_size state_size laurel_rank "
        "hidden_size_per_layer_input adapter_rank gated_norm_rank hc_lowrank loop_gate_rank o_lora_rank "
        "d_rel rotary_dim",
    ),
    (64, "position_bias_max_distance"),
    (32, "position_bias_num_buckets"),
    (4, "prompt_length prompt_types segment_types prompt_mid_dim"),
    # Towers that are built with the language model but never run by a text-only forward.
    (32, "image_size"),
    (
        16,
        "patch_size base_channels nemo_conv_channels ext_pw_out_channel depthwise_separable_out_channel "
        "shape_embed_dim pronunciation_embed_dim downsample_hidden_size codebook_size "
        "projector_input_dim num_position_embeddings codebook_dim vector_quantization_hidden_dimension "
        "upsample_groups num_filters",
    ),
    (HIDDEN_SIZE, "projector_output_dim"),
    (1, "num_codebooks num_residual_layers num_res_blocks"),
)

# Constants that change the residual stream, the attention scores or the logits, at values that show.
_VISIBLE: dict[str, Any] = _table(
    # caps: well inside the range of the logits of these models
    (2.0, "final_logit_softcapping output_logit_soft_cap logits_soft_cap"),
    (
        1.5,
        "attn_logit_softcapping gate_soft_cap moe_router_logit_softcapping mlp_gate_softcap mlp_up_softcap",
    ),
    (0.8, "clip_qkv"),
    # logits
    (0.37, "logit_scale"),
    (1.9, "logits_scaling"),
    (1.7, "logits_mup_width_multiplier"),
    (0.6, "lm_head_multiplier"),
    # embedding and residual stream
    (1.7, "embedding_multiplier"),
    (2.5, "embedding_scale scale_emb"),
    (True, "scale_embedding mup_enabled rescale_embeddings"),
    (0.6, "residual_multiplier"),
    (1.4, "scale_depth"),
    (13, "dim_model_base"),
    (0.9, "linear_attn_alpha_factor full_attn_alpha_factor mlp_alpha_factor"),
    (1.3, "linear_attn_beta_factor full_attn_beta_factor mlp_beta_factor"),
    (0.3, "ngpt_alpha_init"),
    (1.5, "hc_magnitude"),
    (2, "rescale_every"),
    (True, "lm_head_bias"),
    # attention and state-space mixers
    (0.4, "attention_multiplier"),
    (0.7, "attention_value_scale attention_out_multiplier ssm_out_multiplier"),
    (1.3, "attention_in_multiplier key_multiplier ssm_in_multiplier"),
    ([1.2, 0.8], "mlp_multipliers"),
    ([1.2, 0.8, 1.1, 0.9, 1.3], "ssm_multipliers"),
    (6, "query_pre_attn_scalar"),
    (2, "floor_scale log_scaling_n_floor"),
    (0.3, "attn_scale log_scaling_alpha"),
    (1.5, "qk_l2_clip_threshold rel_l2_clip_threshold"),
    # experts
    (1.6, "routed_scaling_factor moe_routed_scaling_factor route_scale router_scaling_factor"),
)
# Off (None) by default in some families; real checkpoints switch these on.
_SET_EVEN_IF_NONE = {
    "attn_logit_softcapping",
    "clip_qkv",
    "embedding_scale",
    "final_logit_softcapping",
    "log_scaling_n_floor",
    "logit_scale",
}

_LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_blocks",
)
# Lists with one entry per layer that say what kind of layer it is.
_LAYER_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")

_TOKEN_ID = re.compile(r"(_token_id|_token_index|(bos|eos|pad|unk|mask)_index)$")
_FIXED_TOKEN_IDS = {
    "pad_token_id": 0,
    "pad_index": 0,
    "bos_token_id": 1,
    "bos_index": 1,
    "eos_token_id": 2,
    "eos_index": 2,
    "forced_eos_token_id": 2,
}

_SLIDING_THEN_FULL = ["sliding_attention", "sliding_attention", "full_attention"]
_FULL_THEN_SLIDING = ["full_attention", "sliding_attention", "sliding_attention"]
_DENSE_THEN_SPARSE = ["dense", "sparse", "sparse"]
_TWO_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 100_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_QWEN_SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _FULL_THEN_SLIDING}
_ZAMBA_LAYERS = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
}
# Gemma 3n and 4: the last two layers reuse the keys and values of the first two.
_SHARED_KV = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
# Gemma 4 has a wider head in the layers with full attention; the default is 512.
_GEMMA4_GLOBAL_HEAD = {"global_head_dim": 2 * HEAD_DIM}
# The assistants draft for a Gemma 4 model: all their layers read that model's keys and values.
_GEMMA4_ASSISTANT = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
}
_INKLING2 = {"num_hidden_layers": 4, "unpadded_vocab_size": 250, "n_layers_per_attn_res_block": 1}
# Sizes of the sliding layers of Dots 3, which are keyword arguments and not fields.
_DOTS3_SLIDING = {
    "swa_num_attention_heads": NUM_HEADS,
    "swa_num_key_value_heads": NUM_HEADS,
    "swa_q_lora_rank": 12,
    "swa_kv_lora_rank": 12,
    "swa_head_dim": 20,
    "swa_qk_nope_head_dim": 12,
    "swa_v_head_dim": 8,
}

# model_type of a configuration or sub-configuration -> keyword arguments on top of the rules above. A dict
# under the name of a sub-configuration holds overrides for that sub-configuration.
_OVERRIDES: dict[str, dict[str, Any]] = {
    # the head is narrower than the embedding
    "apertus1p5_text": {"output_vocab_size": 250},
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": HEAD_DIM},
    # block-sparse attention draws random blocks from numpy's global generator
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    # bytes and four special ids: the vocabulary cannot be chosen
    "blt": {"vocab_size": 260, "encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]},
    "blt_global_transformer": {"num_hidden_layers": 2},
    "blt_local_decoder": {"vocab_size": 260},
    "blt_local_encoder": {"vocab_size": 260, "num_hidden_layers": 1},
    "blt_patcher": {"vocab_size": 260, "num_hidden_layers": 1},
    "codegen": {"rotary_dim": 4},
    "cohere2_moe": {"mlp_layer_types": _DENSE_THEN_SPARSE, "num_shared_experts": 1},
    "cohere_compass_text": {"layer_types": _SLIDING_THEN_FULL, "rope_parameters": _TWO_ROPES},
    # the modeling code reads `rope_theta` from the attention configuration, which does not declare it
    "dbrx": {"attn_config": {"rope_theta": 10_000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v4": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "partial_rotary_factor": 0.5,
        "hc_sinkhorn_iters": 3,
    },
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "dots1": {
        "layer_types": _SLIDING_THEN_FULL,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "dots3_note_text": _DOTS3_SLIDING,
    "dots3_note_vision_encoder": {"mlp_layer_types": _DENSE_THEN_SPARSE},
    # narrower than the residual stream, as in the released small models
    "electra": {"embedding_size": 16},
    "ernie4_5_moe": {"moe_layer_end_index": 2},
    "falcon_h1": {"mamba_d_ssm": 2 * HIDDEN_SIZE, "mamba_d_head": HEAD_DIM},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_audio": {"vocab_size": 16, "vocab_offset": VOCAB_SIZE + 16},
    "gemma3n_text": _SHARED_KV | {"intermediate_size": 64, "activation_sparsity_pattern": [0.9, 0.0, 0.9, 0.0]},
    "gemma4": {
        "text_config": {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "attention_k_eq_v": True,
        }
    },
    "gemma4_assistant": {"text_config": _GEMMA4_ASSISTANT},
    "gemma4_text": _SHARED_KV | _GEMMA4_GLOBAL_HEAD,
    "gemma4_unified_assistant": {"text_config": _GEMMA4_ASSISTANT},
    "gemma4_unified_text": _SHARED_KV | _GEMMA4_GLOBAL_HEAD,
    "git": {"vision_config": {"patch_size": 16}},
    "glm_moe_dsa": {"indexer_types": ["full", "full", "shared"]},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 4},
    "granite_swa": {"layer_rope_theta": [10_000.0, 500.0, 0]},
    "granitemoe_swa": {"layer_rope_theta": [10_000.0, 500.0, 0], "shared_intermediate_size": 24},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_d_head": HEAD_DIM,
    },
    "granitemoeshared": {"shared_intermediate_size": 24},
    "helium": {"head_dim": HIDDEN_SIZE // NUM_HEADS},
    # two stacks of two layers; the low stack runs L_cycles times in each of the H_cycles
    "hrm_text": {"num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 2},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM, "moe_topk": 2},
    "inkling2_loop_text": _INKLING2 | {"loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_num_passes": 2},
    "inkling2_text": _INKLING2 | {"n_layers_per_attn_res_block": 2},
    "inkling_text": {"unpadded_vocab_size": 250, "mlp_layer_types": _DENSE_THEN_SPARSE},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 0,
    },
    "laguna": {"layer_types": _SLIDING_THEN_FULL, "num_attention_heads_per_layer": [NUM_HEADS, 2, NUM_HEADS]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "llama4_text": {"no_rope_layers": [1, 1, 0], "moe_layers": [1]},
    "longcat_flash": {"num_layers": 2, "head_dim": 8},
    "mellum": {"layer_types": _SLIDING_THEN_FULL, "sliding_window": WINDOW},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": _DENSE_THEN_SPARSE,
        "index_block_size": 2,
        "index_topk_blocks": 2,
    },
    "ministral": {"head_dim": HEAD_DIM, "layer_types": _SLIDING_THEN_FULL},
    # a text-only forward skips the layers with cross-attention
    "mllama_text_model": {"cross_attention_layers": [1]},
    "modernbert-decoder": {"local_attention": 2 * WINDOW},
    "nemotron": {"head_dim": HEAD_DIM, "num_key_value_heads": NUM_KV_HEADS},
    "nemotron_h": {"moe_latent_size": 16},
    # narrower than the residual stream: OPT-350m projects on the way in and, after the last block, on the way
    # out
    "opt": {"word_embed_proj_dim": 16},
    "qwen2": _QWEN_SLIDING,
    "qwen2_moe": _QWEN_SLIDING | {"mlp_only_layers": [0]},
    "qwen3": _QWEN_SLIDING,
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen3_next": {"mlp_only_layers": [0]},
    "qwen4_exp_text": {
        "eos_token_id": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "ple_embed_dim": 16,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
    },
    "reformer": {
        "attn_layers": ["local", "lsh", "local"],
        "axial_pos_shape": [8, MAX_POSITIONS // 8],
        "axial_pos_embds_dim": [HIDDEN_SIZE // 2] * 2,
        # without it each forward hashes with fresh random rotations
        "hash_seed": 0,
    },
    # both embeddings differ in width from the residual stream, as in the released model
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 24},
    "roformer": {"embedding_size": 16},
    # four layers, so that the rescaling of every second layer happens inside the stack too
    "rwkv": {"num_hidden_layers": 4},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "whisper": {"begin_suppress_tokens": None},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": _ZAMBA_LAYERS,
    "zamba2": _ZAMBA_LAYERS
    | {"num_key_value_heads": NUM_HEADS, "use_shared_attention_adapter": True, "use_mem_rope": True},
    "zaya": {
        "num_experts_per_tok": 1,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        "sliding_window": WINDOW,
    },
}

# Families whose default configuration does not pass its own validation: what to construct the default with.
_NO_PER_LAYER_INPUT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_DEFAULT_KWARGS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_NO_PER_LAYER_INPUT}},
}

# Families whose causal language model takes the configuration of a part of the model: attribute of that part.
_DECODER_OF = {"musicgen": "decoder", "musicgen_melody": "decoder"}

_ASSISTANT_REASON = (
    "drafts for a Gemma 4 model and ignores input_ids: ValueError: inputs_embeds and shared_kv_states cannot be None."
)
# Families whose forward(input_ids, use_cache=False) fails, with the reason. They can still be built.
NOT_RUNNABLE: dict[str, str] = {
    "gemma4_assistant": _ASSISTANT_REASON,
    "gemma4_unified_assistant": _ASSISTANT_REASON,
}


def causal_lm_types() -> list[str]:
    """All model types for which transformers has a causal language model, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _read(config: PreTrainedConfig, name: str) -> Any:
    """Value of an attribute; of one that varies over the layers, the value that most layers share."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        # such a configuration raises AmbiguousGlobalPerLayerAttributeError on a plain read
        return config.__dict__.get(name)


def _layer_kinds(default: list[str], count: int, *, dense_first: bool) -> list[str]:
    """Shorten a per-layer list to `count` entries such that each kind of the default still occurs."""
    kinds = list(dict.fromkeys(default))
    padding = count - len(kinds)
    # dense MLPs come first and are few, whereas with attention the first kind is the frequent one
    return kinds + kinds[-1:] * padding if dense_first else kinds[:1] * padding + kinds


def _shrunk_kwargs(config: PreTrainedConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for a tiny configuration of the type of `config`, which holds its type's defaults."""
    overrides = _OVERRIDES.get(type(config).model_type, {}) | overrides
    values = {field.name: _read(config, field.name) for field in dataclasses.fields(config)}
    kwargs: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            kwargs[name] = _shrink(value, overrides.get(name, {}))
        elif _TOKEN_ID.search(name) and value is not None:
            kwargs[name] = _FIXED_TOKEN_IDS.get(name)
        elif name in _SIZES and isinstance(value, int):
            # zero means "off" as None does
            kwargs[name] = _SIZES[name] if value else value
        elif name in _VISIBLE and (value is not None or name in _SET_EVEN_IF_NONE):
            kwargs[name] = _VISIBLE[name]
        elif name in _LAYER_COUNTS and value is not None:
            kwargs[name] = NUM_LAYERS
    other_ids = sorted(name for name, value in kwargs.items() if value is None and _TOKEN_ID.search(name))
    kwargs |= {name: 3 + index for index, name in enumerate(other_ids)}
    if "kv_lora_rank" in values and "num_key_value_heads" in kwargs:
        # multi-head latent attention expands the latent to as many key heads as query heads
        kwargs["num_key_value_heads"] = NUM_HEADS

    kinds = {name: values[name] for name in _LAYER_KINDS if isinstance(values.get(name), list) and values[name]}
    counts = [name for name in _LAYER_COUNTS if name in kwargs]
    count = next((overrides[name] for name in counts if name in overrides), None)
    count = count or max([NUM_LAYERS, *(len(set(default)) for default in kinds.values())])
    kwargs |= dict.fromkeys(counts, count)
    for name, default in kinds.items():
        kwargs[name] = _layer_kinds(default, count, dense_first=name == "mlp_layer_types")

    kwargs |= {name: value for name, value in overrides.items() if not isinstance(values.get(name), PreTrainedConfig)}
    return kwargs


def _shrink(config: PreTrainedConfig, overrides: dict[str, Any]) -> PreTrainedConfig:
    return type(config)(**_shrunk_kwargs(config, overrides))


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A configuration of this family that builds in milliseconds and runs on a CPU.

    For the families in `_DECODER_OF` it is the configuration of the decoder, which is what their causal
    language model is built from; `AutoModelForCausalLM.from_config` does not take it.
    """
    default = CONFIG_MAPPING[model_type](**_DEFAULT_KWARGS.get(model_type, {}))
    if model_type in _DECODER_OF:
        default = getattr(default, _DECODER_OF[model_type])
    config = _shrink(default, {})
    if hasattr(config, "is_decoder"):
        # BERT and its relatives attend in both directions unless told that they are decoders
        config.is_decoder = True
    if model_type == "gemma3n":
        # The family's own vision tower needs the package timm. A forward on text does not run the tower, so
        # any tower will do; the field checks its type, hence the detour. Such a configuration cannot be saved
        # and loaded again.
        asked_of_a_tower: dict[str, Any] = {
            "rms_norm_eps": 1e-6,
            "vocab_size": 16,
            "vocab_offset": VOCAB_SIZE,
        }
        config.__dict__["vision_config"] = SiglipVisionConfig(
            hidden_size=HIDDEN_SIZE,
            intermediate_size=HIDDEN_SIZE,
            num_hidden_layers=1,
            num_attention_heads=NUM_HEADS,
            image_size=32,
            patch_size=16,
            **asked_of_a_tower,
        )
    return config


# Parameters with more than one dimension that are not weights of a linear map: decay rates and mixing ratios.
_STRUCTURED = re.compile(r"A_log|time_mix")


def _random_values(name: str, owner: torch.nn.Module, value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random float32 values for one parameter or buffer, given what the family's initialisation put there."""
    leaf = name.rpartition(".")[2]
    normal = torch.randn(value.shape, generator=generator)
    factor = 0.5 + torch.rand(value.shape, generator=generator)
    if "bias" in leaf and leaf != "dt_bias":
        return 0.1 * normal
    if value.ndim >= 2 and not _STRUCTURED.search(leaf):
        # a linear map or an embedding: keeps the size of the activations roughly constant
        return min(max(value.shape[-1] ** -0.5, 0.1), 0.3) * normal
    if "norm" in type(owner).__name__.lower() and not value.any():
        # zero after initialisation: this norm multiplies by (1 + weight)
        return factor - 1
    if leaf == "logit_scale":
        # Dory's logits are cosines, far below one before this scale
        return value.float() * (2 + 2 * factor)
    # norm weights, decay rates, gates, residual scales: near the family's own initial value, not equal to it
    return torch.where(value == 0, 0.1 * normal, value.float() * factor)


@torch.no_grad()
def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Overwrite all weights so that leaving any one of them out of a computation changes the logits."""
    generator = torch.Generator().manual_seed(seed)
    persistent = set(model.state_dict())
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    # buffers are constants of the architecture, except those training adjusts: router biases, layer scales
    tensors |= {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in persistent and buffer.is_floating_point() and re.search(r"bias$|layer_scalar$", name)
    }
    for name, tensor in tensors.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        if "Sinusoidal" in type(owner).__name__:
            continue
        tensor.copy_(_random_values(name, owner, tensor, generator))


def tiny_model(model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of this family in eval mode with random weights, the same ones for the same seed."""
    config = tiny_config(model_type)
    factory: Any = AutoModelForCausalLM.from_config
    if model_type in _DECODER_OF:
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
        factory = model_class._from_config
    # the families initialise from torch's global generator, and some of those values remain visible
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = factory(config, dtype=dtype)
    _randomise(model, seed)
    return model.eval()


def tiny_inputs(model: PreTrainedModel, batch: int = 2, length: int = 7, seed: int = 0) -> torch.Tensor:
    """Token ids [batch, length], valid as input and as target and not special; no two rows are equal."""
    config = model.config.get_text_config()
    # some families embed more ids than they predict
    predicted = getattr(config, "unpadded_vocab_size", None) or getattr(config, "output_vocab_size", None)
    ordinary = range(FIRST_ORDINARY_ID, predicted or config.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(ordinary.start, ordinary.stop, (batch, length), generator=generator)
    # rows that differ in their first token differ, for any length
    ids[:, 0] = ordinary.start + torch.randperm(len(ordinary), generator=generator)[:batch]
    return ids
