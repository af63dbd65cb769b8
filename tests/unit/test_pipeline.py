"""Pipeline: what can't work is said before anything runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest

from murano import keys
from murano.errors import InputError, MissingKeyError, PipelineError
from murano.keys import Key
from murano.pipeline import Pipeline
from murano.results import Results
from murano.steps import LoadPrompts, Plot, Save, Step, step

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
            r"Count \(step 1\) reads 'prompts'.*LoadPrompts \(step 2\) writes it: put that one first",
        ),
        (
            lambda log: [Count(log=log)],
            r"Count \(step 1\) reads 'prompts', which no step before it writes. Add LoadPrompts\(…\) before it",
        ),
        (
            lambda log: [LoadPrompts(["x"]), Double(), Count(log=log)],
            r"Double \(step 2\) reads 'count'.*Count \(step 3\) writes it",
        ),
        (
            lambda log: [LoadPrompts(["x"]), Count(log=log), step(reads=[COUNT_AS_TEXT], writes=["y"])(lambda x: x)],
            r"reads 'count' as a str, but Count \(step 2\) writes a int under that name",
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
    with pytest.warns(UserWarning, match=r"'count' is written twice: by Count \(step 2\) and by Count \(step 3\)"):
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
        ([LoadPrompts], r"Step 1 is the class LoadPrompts, not a step: write LoadPrompts\(…\)"),
        ([len], "Step 1 is a builtin_function"),
        (["x"], "Step 1 is a str"),
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
    with pytest.raises(PipelineError, match=r"halve \(step 1\) reads 'count'.* Count \(step 3\) writes it"):
        Pipeline([halve, LoadPrompts(["The city"]), Count()]).run()
    with pytest.raises(PipelineError, match=r"Double \(step 1\) reads 'count'.* one \(step 2\) writes it"):
        Pipeline([Double(), _one()]).run()
    with pytest.warns(UserWarning, match=r"'half' is written twice: by halve \(step 3\) and by halve \(step 4\)"):
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


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (None, r"^A pipeline is made of a list of steps, not of None: Pipeline\(\[LoadPrompts\(…\), …\]\).$"),
        ("LoadPrompts", "^A pipeline is made of a list of steps, not of 'LoadPrompts'"),
        (LoadPrompts, "^A pipeline is made of a list of steps, not of the class LoadPrompts"),
    ],
)
def test_what_is_no_list_of_steps(steps: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Pipeline(steps)


def test_one_key_needs_no_brackets() -> None:
    @step(reads=keys.PROMPTS, writes="n_prompts")
    def count(prompts: Any) -> int:
        return len(prompts)

    class Twice(Step):
        reads = "n_prompts"  # type: ignore[assignment]
        writes = COUNT

        def run(self, results: Results) -> Mapping[str, Any]:
            return {COUNT: 2 * results["n_prompts"]}

    assert (count.reads, count.writes, Twice.reads, Twice.writes) == (
        ("prompts",),
        ("n_prompts",),
        ("n_prompts",),
        (COUNT,),
    )
    assert Pipeline([LoadPrompts(["x"]), count, Twice()]).run()[COUNT] == 2


@pytest.mark.parametrize("wrong", [3, "", [3], [""], [None]])
def test_what_is_no_key(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"^writes of f: .* must be a key or a list of keys, such as \['logit_lens'\]"):

        @step(writes=wrong)
        def f() -> int:
            return 1

    with pytest.raises(InputError, match=r"^reads of Own: .* must be a key or a list of keys"):
        type("Own", (Step,), {"reads": wrong})


def test_a_plain_name_has_the_type_of_the_known_key() -> None:
    with pytest.raises(InputError, match="Result 'logit_lens' is a LogitLensResult, not a int: 3"):
        step(writes=["logit_lens"])(lambda: 3)()
    with pytest.raises(InputError, match="Result 'prompts' is a PromptBatch, not a list"):
        Results({"prompts": ["The city"]})
    with pytest.raises(PipelineError, match="reads 'prompts' as a str, but LoadPrompts .* writes a PromptBatch"):
        Pipeline([LoadPrompts(["x"]), step(reads=[Key("prompts", str)])(lambda x: None)]).validate()


def test_a_function_that_takes_other_arguments_is_no_step() -> None:
    def pair(a: Any, b: Any) -> None: ...

    with pytest.raises(
        InputError, match=r"^pair\(.*a.*b.*\).* can't be called with the value of reads=\['prompts'\]: reads must"
    ):
        step(reads=["prompts"])(pair)
    with pytest.raises(
        InputError, match=r"can't be called with nothing: reads must name a result for each of its arguments"
    ):
        step(writes=["n"])(pair)
    with pytest.raises(InputError, match="A step is made of a function, not of a int: 3"):
        step(writes=["n"])(3)  # type: ignore[arg-type]
    assert step(reads=["a", "b"])(lambda *both: None)({"a": 1, "b": 2}) == {"a": 1, "b": 2}  # type: ignore[arg-type]
    assert step(reads=["a"], writes=["n"])(max)({"a": [1, 2]})["n"] == 2  # type: ignore[arg-type]


def test_what_is_wrong_in_a_step_of_ones_own_names_it(caplog: pytest.LogCaptureFixture) -> None:
    class Lists(Step):
        writes = (COUNT,)

        def run(self, results: Results) -> Any:
            return [1]

    with pytest.raises(PipelineError, match=r"^Lists.run returned a list, not a dict with .*: \['count'\]."):
        Lists()()

    @step(reads=["prompts"], writes=["n"])
    def divide(prompts: Any) -> float:
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        Pipeline([LoadPrompts(["x"]), divide]).run()
    assert caplog.messages == ["divide (step 2) raised ZeroDivisionError: division by zero"]


def test_a_result_without_its_key_is_told_apart_from_results() -> None:
    prompts = LoadPrompts(["x"]).prompts
    for call in (Count(), Pipeline([Count()]).run, Results):
        with pytest.raises(InputError) as caught:
            call(prompts)  # type: ignore[operator]
        assert str(caught.value) == (
            "Results are a dict of named results, not a PromptBatch: give Results({keys.PROMPTS: …})."
        )
    with pytest.raises(InputError, match=r"not a int: give Results\(\{'name': …\}\)"):
        Count()(3)  # type: ignore[arg-type]


def test_what_dooms_a_later_step_is_said_before_a_slow_one_runs() -> None:
    log: list[str] = []

    class NeedsMany(Step):
        def check_ahead(self, results: Results, between: Any) -> None:
            if "prompts" in results and not any("prompts" in other.writes for other in between):
                raise InputError("too few prompts")

    with pytest.raises(InputError, match=r"^NeedsMany \(step 3\): too few prompts$"):
        Pipeline([LoadPrompts(["x"]), Count(log=log), NeedsMany()]).run()
    with pytest.raises(InputError, match=r"^NeedsMany \(step 2\): too few prompts$"):
        Pipeline([Count(log=log), NeedsMany()]).run(LoadPrompts(["x"])())
    assert log == []
    more = step(reads=["prompts"], writes=["prompts"])(lambda prompts: prompts)
    with pytest.warns(UserWarning), pytest.raises(InputError, match="too few"):
        Pipeline([LoadPrompts(["x"]), Count(log=log), more, NeedsMany()]).run()
    assert log == ["ran"]


def test_what_is_written_after_save_is_told(tmp_path: Any) -> None:
    save = Save(tmp_path, "run")
    with pytest.warns(UserWarning) as caught:
        Pipeline([LoadPrompts(["x"]), save, Count()]).validate()
    assert [str(w.message) for w in caught] == [
        "Save (step 2) comes before Count (step 3): what that one writes is not saved. Put Save last."
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Pipeline([LoadPrompts(["x"]), Count(), save, Plot(tmp_path)]).validate(["logit_lens"])
        Pipeline([LoadPrompts(["x"]), Plot(tmp_path), Count(), save]).validate(["logit_lens"])
    with pytest.warns(UserWarning, match="'output_dir' is written twice") as twice:
        Pipeline([LoadPrompts(["x"]), save, Count(), save]).validate()
    assert len(twice) == 1
