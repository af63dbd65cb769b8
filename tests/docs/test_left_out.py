"""A step of a guide left out: what is said at the place where it is missed names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from murano import MuranoError, MuranoModel, Pipeline, Results, keys, load_run, logit_lens, reread, step
from murano.steps import LoadPrompts, LogitDiff, LogitLens, Plot, Save, TokenProb


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
        "LogitLens (step 2) writes it: put that one first.",
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
    "making the model": (lambda m: LogitLens("gpt2"), "LogitLens(MuranoModel(…))"),
    "making the step": (lambda m: Pipeline([LoadPrompts("A"), TokenProb]), "write TokenProb(…)"),  # type: ignore[list-item]
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_the_error_names_it(what: str, model: MuranoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, says = LEFT_OUT[what]
    with pytest.raises(MuranoError) as caught:
        call(model)
    assert says in str(caught.value)
