"""Pipeline: what can't work is said before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from murano import keys
from murano.errors import InputError, MissingKeyError, PipelineError
from murano.keys import Key
from murano.pipeline import Pipeline
from murano.results import Results
from murano.steps import LoadPrompts, Step, step

COUNT: Key[int] = Key("count", int, written_by="Count")
COUNT_AS_TEXT: Key[str] = Key("count", str)


class Count(Step):
    """Counts prompts, and how often it ran."""

    reads = (keys.PROMPTS,)
    writes = (COUNT,)

    def __init__(self, plus: int = 0, log: list[str] | None = None) -> None:
        self.plus = plus
        self.log = log

    def run(self, results: Results) -> Mapping[str, Any]:
        if self.log is not None:
            self.log.append("ran")
        return {COUNT: len(results[keys.PROMPTS]) + self.plus}


class Double(Step):
    reads = (COUNT,)
    writes = (Key("double", int),)

    def run(self, results: Results) -> Mapping[str, Any]:
        return {"double": 2 * results[COUNT]}


def test_a_chain_runs_in_order() -> None:
    pipeline = Pipeline([LoadPrompts(["The city", "Paris"]), Count(), Double()])
    assert pipeline.validate() == ["prompts", "count", "double"]
    results = pipeline.run()
    assert (results[COUNT], results["double"]) == (2, 4)
    assert [record.name for record in results.history] == ["LoadPrompts", "Count", "Double"]
    assert len(pipeline) == 3
    assert [type(s) for s in pipeline] == [LoadPrompts, Count, Double]


def test_it_goes_on_from_earlier_results() -> None:
    earlier = Pipeline([LoadPrompts(["The city"])]).run()
    results = Pipeline([Count(), Double()]).run(earlier)
    assert results is earlier
    assert results["double"] == 2
    assert Pipeline([Count()]).run({"prompts": earlier["prompts"]})["count"] == 1  # type: ignore[arg-type]
    assert Count(plus=1)(earlier)["count"] == 2


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            lambda log: [Count(log=log), LoadPrompts(["x"])],
            r"Count \(step 0\) reads 'prompts'.*LoadPrompts \(step 1\) writes it: put that one first",
        ),
        (
            lambda log: [Count(log=log)],
            r"Count \(step 0\) reads 'prompts', which no step before it writes. Add LoadPrompts\(…\) before it",
        ),
        (
            lambda log: [LoadPrompts(["x"]), Double(), Count(log=log)],
            r"Double \(step 1\) reads 'count'.*Count \(step 2\) writes it",
        ),
        (
            lambda log: [LoadPrompts(["x"]), Count(log=log), step(reads=[COUNT_AS_TEXT], writes=["y"])(lambda x: x)],
            r"reads 'count' as a str, but Count \(step 1\) writes a int under that name",
        ),
        (
            lambda log: [LoadPrompts(["x"]), Count(log=log), step(reads=["counts"], writes=["y"])(lambda x: x)],
            r"reads 'counts', which no step before it writes. There will be: prompts, count. Did you mean 'count'\?",
        ),
    ],
    ids=["order", "producer", "later", "type", "name"],
)
def test_a_chain_that_cannot_work_runs_nothing(steps: Any, message: str) -> None:
    log: list[str] = []
    with pytest.raises(PipelineError, match=message):
        Pipeline(steps(log)).run()
    assert log == []


def test_a_step_whose_arguments_are_wrong_runs_nothing() -> None:
    log: list[str] = []

    class Wrong(Step):
        def check(self) -> None:
            raise InputError("no such folder")

    with pytest.raises(InputError, match="no such folder"):
        Pipeline([LoadPrompts(["x"]), Count(log=log), Wrong()]).run()
    assert log == []


def test_a_key_written_twice_names_both_steps() -> None:
    pipeline = Pipeline([LoadPrompts(["x"]), Count(), Count(plus=5)])
    with pytest.warns(UserWarning, match=r"'count' is written twice: by Count \(step 1\) and by Count \(step 2\)"):
        results = pipeline.run()
    assert results[COUNT] == 6


def test_explain_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    log: list[str] = []
    Pipeline([LoadPrompts(["The city"]), Count(log=log), Double()]).explain()
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "Pipeline of 3 steps"
    assert "1. LoadPrompts  — → prompts" in out
    assert "1 prompt, the first 'The city'" in out
    assert "2. Count        prompts → count" in out
    assert log == []


def test_repr_reads_back() -> None:
    pipeline = Pipeline([LoadPrompts(["The city", "Paris"]), Count(plus=3), Double()])
    assert repr(pipeline) == "Pipeline([LoadPrompts(['The city', 'Paris']), Count(3), Double()])"
    again = eval(repr(pipeline), {"Pipeline": Pipeline, "LoadPrompts": LoadPrompts, "Count": Count, "Double": Double})
    assert again.run()["double"] == pipeline.run()["double"] == 10


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([LoadPrompts], r"Step 0 is the class LoadPrompts, not a step: write LoadPrompts\(…\)"),
        ([len], "Step 0 is a builtin_function"),
        (["x"], "Step 0 is a str"),
    ],
)
def test_what_is_no_step(steps: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Pipeline(steps)


def test_a_function_as_a_step() -> None:
    @step(reads=[keys.PROMPTS], writes=["first", "rest"])
    def split(prompts: Any) -> tuple[str, int]:
        return str(prompts[0]), len(prompts) - 1

    results = Pipeline([LoadPrompts(["The city", "Paris"]), split]).run()
    assert (results["first"], results["rest"]) == ("The city", 1)
    assert repr(split) == "step(reads=['prompts'], writes=['first', 'rest'])(split)"
    short = step(writes=["a", "b"])(lambda: (1,))
    with pytest.raises(InputError, match=r"returned 1 values for 2 keys"):
        short()


def test_a_function_step_goes_by_the_functions_name() -> None:
    @step(reads=[COUNT], writes=["half"])
    def halve(count: int) -> float:
        return count / 2

    pipeline = Pipeline([LoadPrompts(["The city"]), Count(), halve])
    assert "3. halve        count → half" in pipeline.plan()
    assert [record.name for record in pipeline.run().history] == ["LoadPrompts", "Count", "halve"]
    with pytest.raises(PipelineError, match=r"halve \(step 0\) reads 'count'.* Count \(step 2\) writes it"):
        Pipeline([halve, LoadPrompts(["The city"]), Count()]).run()
    with pytest.raises(PipelineError, match=r"Double \(step 0\) reads 'count'.* one \(step 1\) writes it"):
        Pipeline([Double(), _one()]).run()
    with pytest.warns(UserWarning, match=r"'half' is written twice: by halve \(step 2\) and by halve \(step 3\)"):
        Pipeline([LoadPrompts(["The city"]), Count(), halve, halve]).validate()


def _one() -> Step:
    @step(writes=[COUNT])
    def one() -> int:
        return 1

    return one


def test_a_step_alone_says_what_it_misses() -> None:
    with pytest.raises(MissingKeyError, match="written by LoadPrompts"):
        Count()()

    class Forgets(Step):
        writes = (COUNT,)

        def run(self, results: Results) -> None:
            return None

    with pytest.raises(MissingKeyError, match=r"Forgets did not write \['count'\]"):
        Forgets()()

    class WrongType(Step):
        writes = (COUNT,)

        def run(self, results: Results) -> Mapping[str, Any]:
            return {"count": "three"}

    with pytest.raises(InputError, match="Result 'count' is a int, not a str"):
        WrongType()()
    with pytest.raises(PipelineError, match="Step has no run"):
        Step()()


def test_an_empty_pipeline_gives_nothing() -> None:
    assert Pipeline([]).run() == {}
    assert Pipeline([]).validate() == []
