"""A step of a guide left out: what is said at the place where it is missed names it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.reading import forwards
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from murano import (
    InputError,
    MuranoError,
    MuranoModel,
    Pipeline,
    PipelineError,
    Prompt,
    Results,
    follow_generation,
    keys,
    load_run,
    logit_attribution,
    logit_lens,
    reread,
    step,
)
from murano.steps import (
    FollowGeneration,
    LoadPrompts,
    LogitAttribution,
    LogitDiff,
    LogitLens,
    Plot,
    PredictionDepth,
    Rank,
    Save,
    TokenProb,
)


@pytest.fixture(scope="module")
def model() -> MuranoModel:
    return MuranoModel(tiny_model("llama"), tokenizer=tiny_tokenizer())


@step(reads=[keys.LOGIT_LENS], writes=["n"])
def count(lens: Any) -> int:
    return len(lens)


LEFT_OUT: dict[str, tuple[Callable[[MuranoModel], Any], str]] = {
    "prompts": (lambda m: Pipeline([LogitLens(m)]).run(), "Add LoadPrompts(…) before it."),
    "the lens before a metric": (
        lambda m: Pipeline([LoadPrompts("A"), TokenProb()]).run(),
        "Add LogitLens(…) before it.",
    ),
    "the lens before a step of one's own": (lambda m: count(LoadPrompts("A")()), "It is written by LogitLens."),
    "the order": (
        lambda m: Pipeline([LoadPrompts("A"), TokenProb(), LogitLens(m)]).run(),
        "LogitLens (step 3) writes it: put that one first.",
    ),
    "targets": (
        lambda m: Pipeline([LoadPrompts("The city"), LogitLens(m), TokenProb()]).run(),
        "LoadPrompts(prompts, targets=[…]), before LogitLens",
    ),
    "foils": (
        lambda m: Pipeline([LoadPrompts("The city", targets="of"), LogitLens(m), LogitDiff()]).run(),
        "LoadPrompts(prompts, foils=[…]), before LogitLens",
    ),
    "anything to draw": (lambda m: Pipeline([LoadPrompts("A"), Plot("figures")]).run(), "as LogitLens writes it"),
    "anything to save": (lambda m: Save()(Results()), "Run a pipeline first"),
    "the residuals": (lambda m: reread(logit_lens(m, "A"), m, targets=["B"]), 'LogitLens(model, keep="residuals")'),
    "saving": (lambda m: load_run("runs/first"), "runs', 'first') would write it."),
    "the metric in a run": (lambda m: LoadPrompts("A")()[keys.RANK], "It is written by Rank."),
    "making the model": (lambda m: LogitLens("gpt2"), "LogitLens(MuranoModel(…), …)"),
    "making the step": (lambda m: Pipeline([LoadPrompts("A"), TokenProb]), "write TokenProb(…)"),  # type: ignore[list-item]
}


#: What only the lens would find out, but the prompts already show.
FORETOLD: dict[str, tuple[Callable[[MuranoModel], Any], str]] = {
    "targets": (
        lambda m: Pipeline([LoadPrompts("The city"), LogitLens(m), Save(), TokenProb(), Plot()]),
        "TokenProb (step 4): it needs a target, and no prompt has one. Give one to each: "
        "LoadPrompts(prompts, targets=[…]), before LogitLens reads them.",
    ),
    "foils": (
        lambda m: Pipeline([LoadPrompts("The city", targets="of"), LogitLens(m), TokenProb(), LogitDiff()]),
        "LogitDiff (step 4): it needs a foil, and no prompt has one. Give one to each: "
        "LoadPrompts(prompts, foils=[…]), before LogitLens reads them.",
    ),
    "foils of a metric that is told to take them": (
        lambda m: Pipeline([LoadPrompts("The city", targets="of"), LogitLens(m), Rank(of="foil")]),
        "Rank (step 3): it needs a foil, and no prompt has one.",
    ),
    "targets of an attribution": (
        lambda m: Pipeline([LoadPrompts("The city"), LogitLens(m), LogitAttribution(m)]),
        "LogitAttribution (step 3): it needs a target, and no prompt has one.",
    ),
    "the name of a group": (
        lambda m: Pipeline(
            [
                LoadPrompts([Prompt(text="The city", targets=("of",), metadata={"kind": "x"})]),
                LogitLens(m),
                TokenProb(),
                Plot(by="knid"),
            ]
        ),
        "Plot (step 4): Prompts can't be grouped by 'knid'. Did you mean 'kind'? There is: kind.",
    ),
}


@pytest.mark.parametrize("what", FORETOLD)
def test_it_is_said_before_the_lens_runs(what: str, model: MuranoModel) -> None:
    make, says = FORETOLD[what]
    pipeline = make(model)
    model.check_readout()
    with forwards(model.hf_model) as ran, warnings.catch_warnings(), pytest.raises(InputError) as caught:
        warnings.simplefilter("ignore")
        pipeline.run()
    assert ran == [0]
    assert says in str(caught.value)


def test_a_lens_that_has_its_answers_elsewhere_is_read(model: MuranoModel) -> None:
    lens = Pipeline([LoadPrompts("The city", targets="of"), LogitLens(model)]).run()[keys.LOGIT_LENS]
    own = step(reads=[keys.PROMPTS], writes=[keys.LOGIT_LENS])(lambda prompts: lens)
    assert keys.TOKEN_PROB in Pipeline([LoadPrompts("The city"), own, TokenProb()]).run()
    there = Results({keys.PROMPTS: LoadPrompts("The city").prompts, keys.LOGIT_LENS: lens})
    assert keys.TOKEN_PROB in Pipeline([TokenProb()]).run(there)
    assert keys.PREDICTION_DEPTH in Pipeline([LoadPrompts("The city"), LogitLens(model), PredictionDepth()]).run()


def test_a_lens_by_itself_is_no_results(model: MuranoModel) -> None:
    results = Pipeline([LoadPrompts("The city", targets="of"), LogitLens(model), TokenProb()]).run()
    lens, table = results[keys.LOGIT_LENS], results[keys.TOKEN_PROB]
    for one in (count, Plot(), TokenProb(), Save()):
        with pytest.raises(InputError, match=r"not a LogitLensResult: give Results\(\{keys.LOGIT_LENS: …\}\).$"):
            one(lens)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"not a MetricTable: give Results\(\{keys.TOKEN_PROB: …\}\).$"):
        Plot()(table)


def test_a_figure_before_what_it_draws(model: MuranoModel, tmp_path: Path) -> None:
    plot = Plot(tmp_path)
    with pytest.raises(PipelineError) as caught:
        Pipeline([LoadPrompts("The city"), plot, LogitLens(model)]).validate()
    assert str(caught.value) == (
        "Plot (step 2) comes before LogitLens (step 3): what that one writes is not drawn. Put LogitLens (step 3) first."
    )
    with pytest.warns(
        UserWarning, match=r"Plot \(step 3\) comes before TokenProb \(step 4\): .* not drawn. Put Plot last."
    ):
        Pipeline([LoadPrompts("The city"), LogitLens(model), plot, TokenProb()]).validate()


@pytest.mark.parametrize("wrong", ["gpt2", None, MuranoModel, tiny_model("llama")])
def test_what_is_no_model(wrong: Any) -> None:
    given = "the class MuranoModel" if wrong is MuranoModel else f"a {type(wrong).__name__}"
    for call, name in (
        (lambda: LogitLens(wrong), "LogitLens"),
        (lambda: FollowGeneration(wrong, 2), "FollowGeneration"),
        (lambda: LogitAttribution(wrong), "LogitAttribution"),
        (lambda: logit_lens(wrong, "A"), "logit_lens"),
        (lambda: follow_generation(wrong, "A", max_new_tokens=2), "follow_generation"),
        (lambda: logit_attribution(wrong, "A", targets="B"), "logit_attribution"),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert str(caught.value) == f"{name} needs a MuranoModel, not {given}: {name}(MuranoModel(…), …)."


def test_statistics_that_are_no_names(model: MuranoModel) -> None:
    with pytest.raises(InputError, match=r"^stats=3 must be names of statistics: entropy, .*, or 'all'.$"):
        LogitLens(model, stats=3)
    with pytest.raises(InputError, match="Statistic 3 is unknown"):
        LogitLens(model, stats=[3])


@pytest.mark.parametrize("what", LEFT_OUT)
def test_the_error_names_it(what: str, model: MuranoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, says = LEFT_OUT[what]
    with pytest.raises(MuranoError) as caught:
        call(model)
    assert says in str(caught.value)
