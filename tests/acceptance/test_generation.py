"""Following a generation of the bundled model, against transformers' own ``generate`` and the plain lens."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from murano import MuranoModel, Pipeline, follow_generation, keys, load_run, logit_lens, shipped_prompts
from murano.artifacts.generation_lens import GenerationLensResult
from murano.steps import FollowGeneration, LoadPrompts, Plot, Save

STEPS = 32


@pytest.fixture(scope="module")
def model() -> MuranoModel:
    return MuranoModel(dtype=torch.float32)


@pytest.fixture(scope="module")
def texts(model: MuranoModel) -> list[str]:
    """20 prompts of five lengths, in an order in which they differ."""
    by_length: dict[int, list[str]] = defaultdict(list)
    for text in shipped_prompts("facts").texts:
        by_length[len(model.encode(text))].append(text)
    some = [found[:4] for _, found in sorted(by_length.items()) if len(found) >= 4][:5]
    return [text for four in zip(*some, strict=True) for text in four]


@pytest.fixture(scope="module")
def lens(model: MuranoModel, texts: list[str]) -> GenerationLensResult:
    return follow_generation(model, texts, max_new_tokens=STEPS, layers=[0, 14, 22, 29])


def generate(model: MuranoModel, ids: list[list[int]], **options: object) -> list[list[int]]:
    batch = torch.tensor(ids)
    out = model.hf_model.generate(  # type: ignore[operator]
        batch, attention_mask=torch.ones_like(batch), pad_token_id=model.tokenizer.eos_token_id, **options
    )
    return [row[batch.shape[1] :].tolist() for row in out]


def test_the_tokens_are_those_of_generate(model: MuranoModel, texts: list[str], lens: GenerationLensResult) -> None:
    assert len(texts) == 20 and len({len(model.encode(text)) for text in texts}) == 5
    lengths = [len(model.encode(text)) for text in texts]
    for length in sorted(set(lengths)):
        group = [i for i, n in enumerate(lengths) if n == length]
        out = generate(model, [model.encode(texts[i]) for i in group], max_new_tokens=STEPS, do_sample=False)
        for prompt, written in zip(group, out, strict=True):
            mine = lens.sampled_ids[prompt][lens.steps_mask[prompt]].tolist()
            assert mine == written[: len(mine)]
            assert len(mine) == STEPS or mine[-1] == model.tokenizer.eos_token_id


def test_every_cell_is_that_of_a_plain_lens(model: MuranoModel, texts: list[str]) -> None:
    """Of prompts of three lengths at all layers; benchmarks/generation.py does it for all 20."""
    lens = follow_generation(model, texts[:5:2], max_new_tokens=STEPS)
    counts = lens.steps_mask.sum(-1).tolist()
    written = [[*model.encode(t), *lens.sampled_ids[i, : counts[i] - 1].tolist()] for i, t in enumerate(texts[:5:2])]
    gaps = []
    for prompt, ids in enumerate(written):
        n = counts[prompt]
        plain = logit_lens(model, [ids], positions=range(-n, 0))
        assert torch.equal(lens.top_ids[:, prompt, :n], plain.top_ids[:, 0])
        gaps.append((lens.top_probs[:, prompt, :n] - plain.top_probs[:, 0]).abs().flatten())
    gap = torch.cat(gaps)
    assert gap.numel() == 30 * 5 * sum(counts) > 10_000
    # A forward of one token rounds differently from one of all: of 90 600 probabilities 8 are further apart than 1e-5, and none in float64.
    assert gap.max() < 2e-5
    assert (gap > 1e-5).float().mean() < 1e-3


def test_the_last_layer_is_the_model(lens: GenerationLensResult) -> None:
    assert lens.cache is not None
    torch.testing.assert_close(lens.sampled_log_probs[-1], lens.own_log_probs, atol=1e-4, rtol=0, equal_nan=True)
    assert torch.equal(lens.agreement[-1], lens.steps_mask)
    assert lens.agreement_by_layer()[-1] == 1
    assert lens.agreement_by_layer()[0] < 0.2


@pytest.mark.parametrize("draw", [{"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_what_is_drawn_is_what_generate_draws(model: MuranoModel, draw: dict[str, float]) -> None:
    ids = model.encode("The capital of France is")
    torch.manual_seed(17)
    (written,) = generate(model, [ids], max_new_tokens=16, do_sample=True, top_k=0, **draw)
    drawn = follow_generation(model, [ids], max_new_tokens=16, layers=[10, 29], seed=17, **draw)
    assert drawn.sampled_ids[0].tolist() == written


def test_a_chat_is_answered_until_the_end_of_the_turn(model: MuranoModel) -> None:
    chat = LoadPrompts([[{"role": "user", "content": "Say the word yes."}]], chat=True)
    results = Pipeline([chat, FollowGeneration(model, 40, layers=[20, 29])]).run()
    answer = results[keys.GENERATION_LENS]
    ids = model.encode(chat.prompts[0])
    (written,) = generate(model, [ids], max_new_tokens=40, do_sample=False)
    assert answer.sampled_ids[0].tolist() == written
    assert answer.finished == ("end",)
    assert answer.sampled_words[0][-1] == "<|im_end|>"
    assert "<|im_end|>" not in answer.texts[0]


def test_the_walk_through(model: MuranoModel, tmp_path: Path) -> None:
    steps = [LoadPrompts("The capital of France is"), FollowGeneration(model, max_new_tokens=6)]
    results = Pipeline([*steps, Plot(tmp_path / "plots"), Save(tmp_path, "run")]).run()
    lens = results[keys.GENERATION_LENS]
    assert lens.texts[0].startswith(" Paris")
    assert lens.pairs(29) == [(word, word) for word in lens.sampled_words[0]]
    assert [Path(file).name for file in results[keys.PLOTS]] == ["generation_lens_agreement.png", "generation_lens.png"]
    again = load_run(tmp_path / "run")[keys.GENERATION_LENS]
    assert torch.equal(again.top_ids, lens.top_ids) and torch.equal(again.sampled_ids, lens.sampled_ids)
    assert str(again) == str(lens)
