"""Results: a dict that knows what its keys name."""

from __future__ import annotations

from typing import Any

import pytest

from murano import keys
from murano.errors import InputError, MissingKeyError
from murano.keys import Key
from murano.prompts import as_prompts
from murano.results import Results
from murano.steps import LoadPrompts

SCORE: Key[float] = Key("score", float, written_by="Scorer")


def test_a_key_is_a_plain_string_too() -> None:
    results = Results()
    results[SCORE] = 0.5
    assert results["score"] == results[SCORE] == 0.5
    assert "score" in results
    assert SCORE in results
    assert list(results) == ["score"]
    assert all(type(key) is str for key in results)
    assert keys.LOGIT_LENS == "logit_lens"


def test_a_missing_key_says_what_is_there_and_who_writes_it() -> None:
    with pytest.raises(
        MissingKeyError, match=r"No result 'logit_lens'\. It is written by LogitLens\. Results that are there: none yet"
    ):
        Results()[keys.LOGIT_LENS]
    results = Results(prompts=as_prompts("The city"), score=1.0)
    with pytest.raises(
        MissingKeyError, match=r"No result 'scores'\. Did you mean 'score'\? Results that are there: 'prompts', 'score'"
    ):
        results["scores"]
    with pytest.raises(MissingKeyError, match="written by LogitLens"):
        results["logit_lens"]
    with pytest.raises(KeyError):
        results["nothing"]
    assert results.get("nothing") is None


@pytest.mark.parametrize("value", ["text", 3, None, ["x"]])
def test_a_value_of_another_type_is_refused(value: Any) -> None:
    results = Results()
    with pytest.raises(InputError, match=f"Result 'score' is a float, not a {type(value).__name__}"):
        results[SCORE] = value
    with pytest.raises(InputError, match="Result 'prompts' is a PromptBatch"):
        results.update({keys.PROMPTS: value})
    assert results == {}


def test_update_and_copy_keep_the_history() -> None:
    first = LoadPrompts(["The city"])()
    assert [record.name for record in first.history] == ["LoadPrompts"]
    assert first.history[0].wrote == ("prompts",)
    assert first.history[0].call == "LoadPrompts(['The city'])"
    assert first.history[0].seconds >= 0
    copied = first.copy()
    copied["more"] = 1
    assert "more" not in first
    assert copied.history == first.history
    assert copied.history is not first.history
    other = Results([("a", 1)], b=2)
    other.update(first)
    assert list(other) == ["a", "b", "prompts"]
    assert other.history == first.history


def test_repr_names_what_is_there() -> None:
    assert repr(Results(a=1, b="x")) == "Results(a: int, b: str)"
    assert repr(Results()) == "Results()"
