"""Lenses that no model made: of random numbers, with any words, to be drawn and shown."""

from __future__ import annotations

import torch

from murano.address import Address
from murano.artifacts.generation_lens import GenerationLensResult
from murano.artifacts.logit_lens import LogitLensResult
from murano.artifacts.words import TokenWords
from murano.prompts import Prompt, PromptBatch

WORDS = [" Paris", " London", " the", " a", " Rome", " city", "The", " E", "iff", "el", " Tower", " is", " in", "."]
NASTY = [
    *("$", "$$", "$x_1$", "\n", "\t", "<script>", "</script>", "\\frac{a}^2", "_foo", "&amp;", "<0xE2>", "😀", "中国"),
    *("日本語", "مرحبا", "e\u0301", "\u0301", "\u200b", "x" * 200, "", " ", "    ", " the", "the", "·", "⟨50300⟩"),
    *("<!--", "{{data}}", "\u2028", "\x00\x1b", "%", "#", "👩\u200d👩", "नमस्ते", "\ud800", "\u202e", "\ufffd", "''"),
    "<0xE6><0x88>",
]


def make_lens(
    layers: int = 4,
    prompts: int = 1,
    positions: int = 5,
    k: int = 3,
    words: list[str] = WORDS,
    lengths: list[int] | None = None,
    seed: int = 0,
) -> LogitLensResult:
    """A lens of random logits that turn into the final ones with depth; position *i* holds token *i*."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, prompts, positions, len(words))
    depth = torch.linspace(0, 1, layers).view(-1, 1, 1, 1)
    logits = (
        torch.randn(shape, generator=generator) * (1 - depth) + torch.randn(shape[1:], generator=generator) * 3 * depth
    )
    log_probs = logits.log_softmax(-1)
    top_probs, top_ids = log_probs.exp().topk(k)
    mask = torch.ones(prompts, positions, dtype=torch.bool)
    for prompt, length in enumerate(lengths or []):
        mask[prompt, : positions - length] = False
    position_index = torch.where(mask, mask.long().cumsum(-1) - 1, -1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    top_ids[:, ~mask], top_probs[:, ~mask], entropy[:, ~mask] = -1, float("nan"), float("nan")
    return LogitLensResult(
        addresses=tuple(Address(layer) for layer in range(layers)),
        top_ids=top_ids,
        top_probs=top_probs,
        entropy=entropy,
        log_normalizer=logits.logsumexp(-1),
        input_ids=torch.where(mask, position_index % len(words), -1),
        attention_mask=mask,
        position_index=position_index,
        words=TokenWords(dict(enumerate(words))),
        model={"model_id": "org/model_$1$", "n_layers": layers},
    )


def make_generation(
    layers: int = 6, prompts: int = 2, steps: int = 6, words: list[str] = WORDS, seed: int = 0
) -> GenerationLensResult:
    """A generation that no model wrote: step *i* of prompt *p* writes token *i + p*; layers come to agree with depth."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, prompts, steps)
    sampled = (torch.arange(steps) + torch.arange(prompts).unsqueeze(1)) % len(words)
    agrees = torch.rand(shape, generator=generator) < torch.linspace(0.1, 1, layers).view(-1, 1, 1)
    agrees[-1] = True
    top = torch.where(agrees, sampled, torch.randint(len(words), shape, generator=generator))
    probs = torch.rand(shape, generator=generator)
    return GenerationLensResult(
        addresses=tuple(Address(layer) for layer in range(layers)),
        top_ids=top.unsqueeze(-1).int(),
        top_probs=probs.unsqueeze(-1),
        entropy=probs,
        log_normalizer=probs,
        sampled_ids=sampled,
        sampled_log_probs=probs.log(),
        sampled_ranks=torch.where(top == sampled, 0, 3).int(),
        own_log_probs=probs[-1].log(),
        input_ids=torch.zeros(prompts, 1, dtype=torch.int64),
        texts=tuple("".join(words[i] for i in row) for row in sampled.tolist()),
        finished=("length",) * prompts,
        words=TokenWords(dict(enumerate(words))),
        settings={"max_new_tokens": steps},
        cache="cache",
        model={"model_id": "org/model_$1$", "n_layers": layers},
        prompts=PromptBatch([Prompt(text=f"prompt ${i}$") for i in range(prompts)]),
    )
