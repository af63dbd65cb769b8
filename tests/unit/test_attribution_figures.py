"""Figures, step and command line of an attribution."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import itertools

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from support.reading import held
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from murano import MuranoModel, Pipeline, keys, load_run, logit_attribution, logit_lens
from murano.artifacts.logit_attribution import LogitAttributionResult, summed
from murano.cli import main
from murano.errors import InputError
from murano.plotting import plot_attribution, plot_attribution_grid
from murano.plotting.attribution import waterfall
from murano.plotting.attribution_grid import attribution_grid
from murano.prompts import Prompt, as_prompts
from murano.steps import LoadPrompts, LogitAttribution, LogitLens, Plot, Save

TEXTS, TARGETS, FOILS = ["The capital of France is", "Paris is in"], [" Paris", " France"], [" London", " the"]


def found(family: str = "llama", by: str = "component") -> LogitAttributionResult:
    return logit_attribution(held(family), TEXTS, targets=TARGETS, foils=FOILS, by=by)


def test_the_bars_add_up_to_the_model() -> None:
    result = found()
    ax = plot_attribution(result, 1)
    bars = ax.patches
    assert len(bars) == len(result.components)
    assert [b.get_width() for b in bars] == pytest.approx(result.values()[1].tolist(), abs=1e-6)
    for below, above in itertools.pairwise(bars):
        assert above.get_x() == pytest.approx(below.get_x() + below.get_width(), abs=1e-6)
    assert bars[-1].get_x() + bars[-1].get_width() == pytest.approx(float(result.total()[1]), abs=1e-5)
    assert "·France less that of" in ax.get_xlabel()
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["embeddings, bias", "attention", "MLP", f"the model: {float(result.total()[1]):+.2f}"]
    plt.close("all")


def test_heads_are_added_up_and_the_mean_is_a_mean() -> None:
    heads, parts = found(by="head"), found()
    assert np.allclose(waterfall(heads, 0).values, waterfall(parts, 0).values, atol=1e-5)
    mean = waterfall(parts, None)
    assert np.allclose(mean.values, parts.values().mean(0).numpy(), atol=1e-6)
    assert mean.title.endswith("mean of 2 prompts")
    assert mean.x_title == "logit of the target less that of the foil"


def test_the_lens_beside_the_sum() -> None:
    model, result = held("llama"), found()
    lens = logit_lens(model, as_prompts(TEXTS, targets=TARGETS, foils=FOILS), positions="last")
    curve = waterfall(result, 0, lens=lens, of="target").curve
    expected = (lens.target_log_probs[:, 0, -1, 0] + lens.log_normalizer[:, 0, -1]).numpy()  # type: ignore[index]
    assert np.allclose(curve, expected, atol=1e-5)
    assert curve[-1] == pytest.approx(float(result.total("target")[0]), abs=1e-4)  # both end at the model
    assert waterfall(result, 0, lens=lens).curve[-1] == pytest.approx(float(result.total()[0]), abs=1e-4)
    ax = plot_attribution(result, 0, lens=lens)
    assert ax.get_legend().get_texts()[-1].get_text() == "logit lens"
    plt.close("all")
    other = logit_lens(model, as_prompts(TEXTS, targets=FOILS, foils=TARGETS), positions="last")
    with pytest.raises(InputError, match="The lens is of other prompts"):
        waterfall(result, 0, lens=other)


def test_a_soft_cap_is_written_on_the_figure() -> None:
    assert "before the soft-cap" in waterfall(found("gemma2"), 0).x_title
    assert "before the soft-cap" in attribution_grid(found("gemma2")).below_title
    assert "soft-cap" not in waterfall(found(), 0).x_title


def test_grids() -> None:
    parts = attribution_grid(found(), 0)
    assert list(parts.below) == [["attn"], ["MLP"]]
    values = found().values()[0]
    names = [str(a) for a in found().components]
    assert parts.values[2, 1] == pytest.approx(float(values[names.index("L2.mlp_out")]))
    heads = attribution_grid(found(by="head"))
    assert list(heads.below) == [["h0"], ["h1"], ["h2"], ["h3"], ["MLP"]]
    assert heads.title.endswith("mean of 2 prompts")
    layers = attribution_grid(found(by="layer"))
    assert layers.values.shape == (3, 1)
    plot_attribution_grid(found(by="head"), 1)
    plt.close("all")


@pytest.mark.parametrize("draw", [plot_attribution, plot_attribution_grid])
def test_what_can_not_be_drawn(draw: Any) -> None:
    with pytest.raises(InputError, match="A LogitAttributionResult is needed, not str"):
        draw("no")
    with pytest.raises(InputError, match="Prompt 5 does not exist"):
        draw(found(), 5)
    with pytest.raises(InputError, match="no prompt has a foil"):
        draw(logit_attribution(held("llama"), TEXTS[0], targets=[" Paris"]), 0, of="difference")


# The step


def test_in_a_pipeline(tmp_path: Path) -> None:
    model = held("llama")
    steps = [
        LoadPrompts(TEXTS, targets=TARGETS, foils=FOILS),
        LogitAttribution(model, by="head"),
        Plot(output_dir=tmp_path / "plots"),
        Save(tmp_path, "run"),
    ]
    results = Pipeline(steps).run()
    result = results[keys.LOGIT_ATTRIBUTION]
    assert torch.equal(result.contributions, found(by="head").contributions)
    names = [Path(file).name for file in results[keys.PLOTS]]
    assert names == ["logit_attribution_0.png", "logit_attribution_1.png", "logit_attribution_grid.png"]
    again = load_run(tmp_path / "run")["logit_attribution"]
    assert torch.equal(again.contributions, result.contributions)
    assert again.components == result.components
    assert again.words[int(result.answer_ids[0, 0])] == " Paris"


def test_answers_of_the_step_replace_the_prompts_own() -> None:
    model = held("llama")
    results = Pipeline([LoadPrompts(TEXTS, targets=FOILS), LogitAttribution(model, TARGETS, FOILS)]).run()
    assert torch.equal(results[keys.LOGIT_ATTRIBUTION].answer_ids, found().answer_ids)
    assert repr(LogitAttribution(model, by="layer")).endswith("by='layer')")
    assert "by head, positions 'last'" in LogitAttribution(model, by="head").describe()


def test_arguments_are_checked_before_anything_runs() -> None:
    with pytest.raises(InputError, match="needs a MuranoModel, not a str"):
        LogitAttribution("gpt2")
    with pytest.raises(InputError, match="by='parts' is unknown"):
        LogitAttribution(held("llama"), by="parts")
    with pytest.raises(InputError, match="positions='end' is unknown"):
        LogitAttribution(held("llama"), positions="end")


def test_beside_a_lens(tmp_path: Path) -> None:
    model = held("llama")
    steps = [LoadPrompts(TEXTS[:1], targets=TARGETS[:1]), LogitLens(model), LogitAttribution(model), Plot(tmp_path)]
    names = [Path(file).name for file in Pipeline(steps).run()[keys.PLOTS]]
    assert names == ["logit_lens.png", "logit_attribution.png", "logit_attribution_grid.png"]


# The command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def test_attribute(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["attribute", TEXTS[0], "--target", "Paris", "--foil", "London", "--model", folder]
    plot = str(tmp_path / "a.png")
    assert main([*arguments, "--by", "head", "--top-k", "3", "--plot", plot, "--save", str(tmp_path / "run")]) == 0
    out, err = capsys.readouterr()
    expected = found(by="head").top(3, prompt=0)
    assert out == f"prompt: {TEXTS[0]!r}\n\n{expected!r}\n"
    assert "a.png" in err and "a-heads.png" in err
    assert (tmp_path / "a-heads.png").stat().st_size > 5000
    assert load_run(tmp_path / "run")["logit_attribution"].by == "head"
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    target, foil = shown["prompts"][0]["answers"]
    assert (target["token"], foil["token"]) == (" Paris", " London")
    assert sum(target["contributions"].values()) == pytest.approx(target["logit"], abs=1e-5)
    names, added = summed(found(by="head"))
    assert list(target["contributions"]) == [str(a) for a in names]
    assert list(target["contributions"].values()) == pytest.approx(added[0, 0, 0].tolist(), abs=1e-5)


def test_attribute_a_file(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "facts.jsonl"
    lines = [{"prompt": p, "target": t, "foil": f} for p, t, f in zip(TEXTS, TARGETS, FOILS, strict=True)]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert main(["attribute", "--file", str(file), "--model", folder]) == 0
    out = capsys.readouterr().out
    assert out.count("(one prompt)") == 2 and out.count("(mean of 2 prompts)") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "There are no prompts"),
        (["x"], "Prompt 0 has no target"),
        (["x", "y", "--target", "a"], "2 prompts and 1 targets"),
        (["--target", "a"], "belong to a PROMPT"),
        (["x", "--target", "a", "--by", "heads"], "by='heads' is unknown"),
        (["x", "--target", "a", "--top-k", "0"], "--top-k 0"),
        (["x", "--target", "a", "--plot", "a.gif"], "'a.gif'"),
    ],
)
def test_bad_input(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attribute", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and named in err and err.count("\n") == 1


def ragged(by: str = "component", **options: Any) -> LogitAttributionResult:
    """Three prompts of which the second has no foil, and the third one token."""
    prompts = [*TEXTS, Prompt(token_ids=(40,))]
    targets, foils = [*TARGETS, 50], [FOILS[0], None, 60]
    return logit_attribution(held("llama"), prompts, targets=targets, foils=foils, by=by, positions="all", **options)


def test_positions_are_those_of_tokens_in_their_prompt() -> None:
    whole = found()
    some = logit_attribution(held("llama"), TEXTS, targets=TARGETS, foils=FOILS, positions=[-1, 0])
    assert torch.equal(some.values(), some.values(position=-1))  # the last one, wherever it stands on the axis
    torch.testing.assert_close(some.values(), whole.values(), rtol=0, atol=1e-5)
    first = logit_attribution(held("llama"), TEXTS, targets=TARGETS, foils=FOILS, positions=[0])
    torch.testing.assert_close(some.values(position=0), first.values(), rtol=0, atol=1e-5)
    assert "one prompt, at token 0, 'The'" in repr(first.top(1, prompt=0))
    assert "(one prompt)" in repr(some.top(1, prompt=0))
    assert waterfall(first, 0).title.endswith("prompt 0, at token 0, 'The'")
    with pytest.raises(InputError, match=r"Position -1 was not read.*read were 0\."):
        first.values(position=-1)


def test_what_has_no_number_is_said_and_not_counted() -> None:
    result = ragged()
    assert [len(one) for one in result] == [1, 1, 1]
    assert "(mean of 2 prompts)" in repr(result.top(1, of="difference"))
    assert "(mean of 2 prompts)" in repr(result.top(1, of="target", position=-3))
    assert result.table("difference").left_out == {"1": "it has no foil, so there is no difference: use of='target'"}
    assert waterfall(result, None, of="difference").title.endswith("mean of 2 prompts")
    for draw in (result.top, lambda **o: plot_attribution(result, **o), lambda **o: plot_attribution_grid(result, **o)):
        with pytest.raises(InputError, match="Prompt 1 has no foil"):
            draw(prompt=1, of="difference")
        with pytest.raises(InputError, match="Prompt 2 has nothing at position -3: read were 0"):
            draw(prompt=2, of="target", position=-3)
    for k in (0, -1, 2.5, "3", True):
        with pytest.raises(InputError, match="must be a whole number from 1"):
            result.top(k)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no prompts"):
        result[[]].top()
    plt.close("all")


def test_a_lens_of_something_else_is_not_drawn_over_it() -> None:
    result = found()
    model, answers = held("llama"), {"targets": TARGETS, "foils": FOILS}
    for options, said in (
        ({"positions": [0]}, "was not read"),
        ({"target_mode": "sequence"}, "target_mode='first'"),
    ):
        lens = logit_lens(model, as_prompts(TEXTS, **answers), **options)
        with pytest.raises(InputError, match=said):
            plot_attribution(result, 0, lens=lens)
    first = logit_attribution(model, TEXTS, **answers, positions=[0, -1])
    lens = logit_lens(model, as_prompts(TEXTS, **answers))
    curve = waterfall(first, 0, position=0, lens=lens).curve
    logits = lens.target_log_probs[:, 0, lens.column(0, 0), 0] - lens.foil_log_probs[:, 0, lens.column(0, 0), 0]
    assert curve == pytest.approx(logits.tolist(), abs=1e-5)
    plt.close("all")


def test_neurons_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    result = ragged("neuron_topk", neurons=10**6)
    n = result.model["n_layers"] * held("llama").config.intermediate_size
    assert result.neurons.shape[-1] == n  # all there are
    top = result.top_neurons(4, prompt=0)
    values = result._pick(result.neurons, "target", None)[0]
    assert top.values.abs().tolist() == values.abs().sort(descending=True).values[:4].tolist()
    layer, neuron = result.neuron_index[0, -1][values.abs().argmax()].tolist()
    assert top.names[0] == f"L{layer}.mlp_out.n{neuron}"
    with pytest.raises(InputError, match='by="neuron_topk"'):
        found().top_neurons()


def test_other_widths_and_arguments() -> None:
    model = MuranoModel(tiny_model("llama").double(), tokenizer=tiny_tokenizer())
    result = logit_attribution(model, TEXTS, targets=TARGETS, by="head")
    assert float(result.leftover.abs().max()) < 1e-5
    for wrong in (0, -4, 1.5, "a", True):
        with pytest.raises(InputError, match=f"max_batch_tokens={wrong!r}"):
            logit_attribution(model, TEXTS, targets=TARGETS, max_batch_tokens=wrong)  # type: ignore[arg-type]
    noted = logit_attribution(model, TEXTS, targets=[["a", "b"], "c"]).notes
    assert any("Several targets or foils (prompt 0): each" in note for note in noted)


@pytest.mark.parametrize("targets", [b"ab", {" Paris", " France"}, {"target": " Paris"}, [b" Paris", " France"]])
def test_containers_whose_items_are_no_answers(targets: Any) -> None:
    with pytest.raises(InputError, match="targets"):
        as_prompts(TEXTS, targets=targets)


def test_nothing_is_lost_to_a_figure(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["attribute", TEXTS[0], "--target", "Paris", "--model", folder]
    assert main([*asked, "--plot", str(tmp_path / "x.html"), "--save", str(tmp_path / "run")]) == 2
    assert "of this is one of .png, .pdf, .svg." in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert main([*asked, "--by", "neuron_topk", "--top-k", "2"]) == 0
    assert ".mlp_out.n" in capsys.readouterr().out
    assert main([*asked, "--by", "neuron_topk", "--json"]) == 0
    neurons = json.loads(capsys.readouterr().out)["prompts"][0]["answers"][0]["neurons"]
    assert len(neurons) == 20 and all(name.startswith("L") for name in neurons)
