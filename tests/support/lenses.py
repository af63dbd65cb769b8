"""Lenses that no model made: of random numbers, with any words, to be drawn and shown."""

from __future__ import annotations

import torch

from murano.address import Address
from murano.artifacts.logit_lens import LogitLensResult
from murano.artifacts.words import TokenWords

WORDS = [" Paris", " London", " the", " a", " Rome", " city", "The", " E", "iff", "el", " Tower", " is", " in", "."]
NASTY = [
    *("$", "$$", "$x_1$", "\n", "\t", "<script>", "</script>", "\\frac{a}^2", "_foo", "&amp;", "<0xE2>", "😀", "中国"),
    *("日本語", "مرحبا", "e\u0301", "\u0301", "\u200b", "x" * 200, "", " ", "    ", " the", "the", "·", "⟨50300⟩"),
    *("<!--", "{{data}}", "\u2028", "\x00\x1b", "%", "#", "👩\u200d👩", "नमस्ते", "\ud800", "\u202e", "\ufffd", "''"),
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
