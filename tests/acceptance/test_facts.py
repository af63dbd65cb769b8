"""The facts that come with the package, on the bundled model: every number against plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from murano import (
    InputError,
    LogitLensResult,
    MuranoModel,
    Prompt,
    PromptBatch,
    load_artifact,
    logit_lens,
    metrics,
    reread,
    save_artifact,
    shipped_prompts,
)
from murano.readout import stats


@pytest.fixture(scope="module")
def model() -> MuranoModel:
    return MuranoModel(dtype=torch.float32)


@pytest.fixture(scope="module")
def facts() -> PromptBatch:
    return shipped_prompts("facts")


@pytest.fixture(scope="module")
def lens(model: MuranoModel, facts: PromptBatch) -> LogitLensResult:
    return logit_lens(model, facts, positions="last")


@pytest.fixture(scope="module")
def own(model: MuranoModel, facts: PromptBatch) -> torch.Tensor:
    """transformers' own logits after each prompt, one at a time."""
    rows = []
    for prompt in facts:
        ids = model.tokenizer(prompt.text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            rows.append(model.hf_model(ids).logits[0, -1])
    return torch.stack(rows)


def naive_ids(model: MuranoModel, facts: PromptBatch, kind: str) -> torch.Tensor:
    """The first token after the prompt, with a space where the prompt ends in a word and none after a quote."""
    ids = []
    for prompt in facts:
        text = ("" if prompt.text.endswith('"') else " ") + getattr(prompt, kind)[0]
        n = len(model.tokenizer(prompt.text)["input_ids"])
        ids.append(model.tokenizer(prompt.text + text)["input_ids"][n])
    return torch.tensor(ids)


def test_last_layer_is_the_model(
    model: MuranoModel, facts: PromptBatch, lens: LogitLensResult, own: torch.Tensor
) -> None:
    targets, foils = naive_ids(model, facts, "targets"), naive_ids(model, facts, "foils")
    p = own.double().softmax(-1)
    of_target = p.gather(1, targets.unsqueeze(1)).squeeze(1)
    assert (metrics.token_prob(lens)[-1].double() - of_target).abs().max() < 1e-5
    assert torch.equal(metrics.match(lens)[-1].bool(), own.argmax(-1) == targets)
    assert torch.equal(lens.predicted_tokens[-1, :, -1], own.argmax(-1))  # the greedy next token of every prompt
    difference = own.gather(1, targets.unsqueeze(1)) - own.gather(1, foils.unsqueeze(1))
    assert (metrics.logit_diff(lens)[-1] - difference.squeeze(1)).abs().max() < 1e-4
    ranks = torch.tensor([(row > row[t]).sum() for row, t in zip(own, targets, strict=True)])
    off = (metrics.rank(lens)[-1] - ranks).abs()
    assert off.max() <= 1  # two logits within rounding of each other may change places
    assert (off == 0).float().mean() > 0.98


def test_statistics_of_every_cell(model: MuranoModel) -> None:
    names = ("entropy", "max_prob", "margin", "kl", "js", "surprisal", "next_rank")
    prompts = ["The capital of France is the city of", "One, two,"]
    lens = logit_lens(model, prompts, stats=names, keep="residuals", top_k=1)
    assert lens.top_ids.shape[-1] == 1
    full = lens.decode(model).nan_to_num()
    there = lens.attention_mask.expand(30, -1, -1)
    last = full[-1:].expand_as(full)
    following = lens.input_ids.roll(-1, dims=1).clamp(min=0).expand(30, -1, -1)
    expected = {
        "entropy": stats.entropy(full),
        "max_prob": stats.max_prob(full),
        "margin": stats.margin(full),
        "kl": stats.kl_divergence(full, last),
        "js": stats.js_divergence(full, last),
        "surprisal": stats.surprisal(full, following),
    }
    for name, values in expected.items():
        mask = there.clone()
        if name == "surprisal":
            mask[..., -1] = False
            assert lens.stats[name][..., -1].isnan().all()
        torch.testing.assert_close(lens.stats[name][mask], values[mask], atol=5e-5, rtol=5e-5)
        assert lens.stats[name][~there].isnan().all()
    mask = there.clone()
    mask[..., -1] = False
    ranks = stats.rank(full, following).float()
    assert (lens.stats["next_rank"] == ranks)[mask].float().mean() > 0.99
    assert lens.stats["kl"][-1].nan_to_num().max() < 1e-5
    # Little room: a chunk of two rows gives the same.
    tight = logit_lens(model, prompts, stats=names, top_k=1, max_chunk_bytes=2 * 4 * model.vocab_size, layers=[3, 29])
    for name in ("kl", "js", "margin", "surprisal"):
        torch.testing.assert_close(tight.stats[name], lens.stats[name][[3, 29]], atol=5e-5, rtol=5e-5, equal_nan=True)
    # The last layer need not be among those that are read.
    alone = logit_lens(model, prompts, stats="kl", layers=[3])
    torch.testing.assert_close(alone.stats["kl"], lens.stats["kl"][[3]], atol=5e-5, rtol=5e-5, equal_nan=True)


def test_whole_answers(model: MuranoModel) -> None:
    """An answer of several tokens, teacher-forced, beside the sum that transformers gives."""
    prompts = [
        Prompt(text="The capital of Burkina Faso is", targets=("Ouagadougou", "Paris"), foils=("Timbuktu",)),
        Prompt(text="One, two,", targets=("three, four, five",)),
    ]
    with pytest.warns(UserWarning, match="3 answers of several tokens are read by the first one: of ' Ouagadougou'"):
        first = logit_lens(model, prompts)
    lens = logit_lens(model, prompts, target_mode="sequence")
    assert lens.target_log_probs is not None
    assert lens.target_ranks is not None
    for prompt, targets in ((0, [" Ouagadougou", " Paris"]), (1, [" three, four, five"])):
        for column, target in enumerate(targets):
            n = len(model.tokenizer(prompts[prompt].text)["input_ids"])
            ids = model.tokenizer(prompts[prompt].text + target, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                log_p = model.hf_model(ids).logits[0].log_softmax(-1)
            expected = sum(float(log_p[i - 1, ids[0, i]]) for i in range(n, ids.shape[1]))
            worst = max(int((log_p[i - 1] > log_p[i - 1, ids[0, i]]).sum()) for i in range(n, ids.shape[1]))
            assert float(lens.target_log_probs[-1, prompt, -1, column]) == pytest.approx(expected, abs=1e-3)
            assert int(lens.target_ranks[-1, prompt, -1, column]) == worst
    assert lens.target_log_probs[:, 0, :-1].isnan().all()
    assert float(metrics.match(lens)[-1][1]) == float(worst == 0)
    assert first.target_log_probs is not None
    single = first.target_log_probs[:, 0, -1, 1]
    torch.testing.assert_close(lens.target_log_probs[:, 0, -1, 1], single, atol=1e-3, rtol=1e-4)
    with pytest.raises(InputError, match="positions=.* where target_mode='sequence' reads its target"):
        logit_lens(model, prompts, target_mode="sequence", positions=[0])


def test_another_question_of_the_residuals(model: MuranoModel, tmp_path: Path) -> None:
    prompts = ["The capital of France is", "The opposite of hot is the word"]
    kept = logit_lens(model, prompts, keep="residuals")
    kept = load_artifact(save_artifact(tmp_path / "lens.pt", kept), LogitLensResult)
    asked = reread(kept, model, targets=["Paris", "cold"], foils=["Rome", None], stats=("kl", "surprisal"))
    directly = logit_lens(
        model,
        [Prompt(text=prompts[0], targets=("Paris",), foils=("Rome",)), Prompt(text=prompts[1], targets=("cold",))],
        stats=("kl", "surprisal"),
    )
    for name in ("target_log_probs", "foil_log_probs"):
        torch.testing.assert_close(getattr(asked, name), getattr(directly, name), atol=1e-4, rtol=1e-4, equal_nan=True)
    for name in ("kl", "surprisal"):
        torch.testing.assert_close(asked.stats[name], directly.stats[name], atol=1e-4, rtol=1e-4, equal_nan=True)
    assert torch.equal(asked.top_ids, kept.top_ids)
    whole = logit_lens(
        model, Prompt(text="One, two,", targets=("three, four",)), target_mode="sequence", keep="residuals", layers=[29]
    )
    again = reread(whole, model, stats="js")  # answers stay as they were read
    assert (again.target_mode, again.target_texts) == ("sequence", ((" three, four",),))
    assert torch.equal(again.target_log_probs[:, :, -1], whole.target_log_probs[:, :, -1])  # type: ignore[index]
    for bad in (0, 10**6):
        with pytest.raises(InputError, match=f"top_k={bad}: it must be a whole number from 1 to 49152"):
            reread(kept, model, top_k=bad)
    with pytest.raises(InputError, match="No residuals were kept"):
        reread(directly, model)
    without = logit_lens(model, prompts, keep="residuals", layers=[0, 1])
    with pytest.raises(InputError, match="Divergences need the last layer"):
        reread(without, model, stats="kl")


def test_all_logits(model: MuranoModel) -> None:
    lens = logit_lens(model, "The capital of France is", keep="logits", layers=[0, 29])
    ids = model.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        own = model.hf_model(ids).logits
    assert lens.logits is not None
    assert lens.logits.shape == (2, 1, 5, model.vocab_size)
    torch.testing.assert_close(lens.logits[1], own, atol=1e-4, rtol=0)
    with pytest.raises(
        InputError,
        match=r"keep='logits' needs 236.0 GB \(30 layers × 40 prompts × 1000 positions × 196656 bytes\).*Instead: keep='residuals', and",
    ):
        logit_lens(model, [list(range(1000))] * 40, keep="logits")


def test_one_prompt_and_one_position(lens: LogitLensResult, facts: PromptBatch) -> None:
    one = lens[3]
    assert one.n_prompts == 1
    assert one.prompts is not None
    assert one.prompts[0] == facts[3]
    assert torch.equal(one.top_ids, lens.top_ids[:, 3:4])
    assert torch.equal(one.target_ranks, lens.target_ranks[:, 3:4])  # type: ignore[index,arg-type]
    assert len(lens[2:7]) == 5
    assert [part.input_ids.tolist() for part in lens][:2] == [lens[0].input_ids.tolist(), lens[1].input_ids.tolist()]
    printed = repr(lens.at(3))
    assert len(printed.splitlines()) == 31
    assert "p(' Berlin')" in printed.splitlines()[0]
    with pytest.raises(InputError, match="Prompt 999 does not exist"):
        lens[999]


def test_a_data_frame(lens: LogitLensResult) -> None:
    frame = lens.to_dataframe()
    assert len(frame) == 30 * lens.n_prompts
    row = frame[(frame.prompt == 3) & (frame.layer == 29)].iloc[0]
    assert row.category == "capitals"
    assert row.target == " Berlin"
    assert row.target_prob == pytest.approx(float(metrics.token_prob(lens)[-1][3]))
    assert row.predicted_token == lens.predicted_words[29][3][-1]
    assert row.prob == pytest.approx(float(lens.max_probs[29, 3, -1]))
