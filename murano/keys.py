"""The names under which steps share results. Each is a plain string and, for a type checker, the type of its value."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from murano.errors import InputError

if TYPE_CHECKING:
    from murano.artifacts.generation_lens import GenerationLensResult
    from murano.artifacts.logit_attribution import LogitAttributionResult
    from murano.artifacts.logit_lens import LogitLensResult
    from murano.artifacts.metric_table import MetricTable
    from murano.prompts import PromptBatch

T_co = TypeVar("T_co", covariant=True)


class Key(str, Generic[T_co]):
    """A name of a result that knows the type of what it names.

    Args:
        name: the plain string; ``Key("logit_lens") == "logit_lens"``.
        type: the value's class, or ``"module:Class"`` so that naming a type imports nothing. Empty: any value.
        written_by: the step that usually writes it, for the error when it is missing.

    Raises:
        InputError: the name is no string, or empty.

    >>> SCORE: Key[float] = Key("score", float, written_by="Scorer")
    >>> SCORE == "score", SCORE.type_name
    (True, 'float')
    """

    type_path: str
    written_by: str

    def __new__(cls, name: str, type: type[Any] | str = "", *, written_by: str = "") -> Key[T_co]:
        if not isinstance(name, str) or not name:
            raise InputError(f"{name!r:.80} is no name of a result: a key is a string, such as 'logit_lens'.")
        key = super().__new__(cls, name)
        key.type_path = type if isinstance(type, str) else f"{type.__module__}:{type.__qualname__}"
        key.written_by = written_by
        return key

    @property
    def type_name(self) -> str:
        """The bare name of the value's class; empty when any value will do."""
        return self.type_path.rpartition(":")[2]

    def resolve_type(self) -> type[Any] | None:
        """The value's class, imported now; ``None`` when any value will do or the class can't be imported."""
        module, _, name = self.type_path.partition(":")
        if not name:
            return None
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):  # a class defined inside a function, say: nothing to check against
            return None
        return found if isinstance(found, type) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_key, (str(self), self.type_path, self.written_by))


def _key(name: str, type_path: str, written_by: str) -> Key[Any]:
    return Key(name, type_path, written_by=written_by)


#: The prompts that the model reads.
PROMPTS: Key[PromptBatch] = Key("prompts", "murano.prompts:PromptBatch", written_by="LoadPrompts")
#: What each layer predicts at each position.
LOGIT_LENS: Key[LogitLensResult] = Key(
    "logit_lens", "murano.artifacts.logit_lens:LogitLensResult", written_by="LogitLens"
)
#: What each layer predicts at each token that the model writes.
GENERATION_LENS: Key[GenerationLensResult] = Key(
    "generation_lens", "murano.artifacts.generation_lens:GenerationLensResult", written_by="FollowGeneration"
)
#: What wrote the final logit of each answer.
LOGIT_ATTRIBUTION: Key[LogitAttributionResult] = Key(
    "logit_attribution", "murano.artifacts.logit_attribution:LogitAttributionResult", written_by="LogitAttribution"
)
#: Metrics of the answers through depth; each is a :class:`~murano.artifacts.metric_table.MetricTable`.
_TABLE = "murano.artifacts.metric_table:MetricTable"
TOKEN_PROB: Key[MetricTable] = Key("token_prob", _TABLE, written_by="TokenProb")
MATCH: Key[MetricTable] = Key("match", _TABLE, written_by="Match")
LOGIT_DIFF: Key[MetricTable] = Key("logit_diff", _TABLE, written_by="LogitDiff")
RANK: Key[MetricTable] = Key("rank", _TABLE, written_by="Rank")
PREDICTION_DEPTH: Key[MetricTable] = Key("prediction_depth", _TABLE, written_by="PredictionDepth")
COMMITMENT: Key[MetricTable] = Key("commitment", _TABLE, written_by="Commitment")
#: The folder that ``Save`` wrote the run into.
OUTPUT_DIR: Key[str] = Key("output_dir", str, written_by="Save")
#: The figures that ``Plot`` wrote.
PLOTS: Key[list[str]] = Key("plots", list, written_by="Plot")


def as_key(name: str) -> Key[Any]:
    """The key of a name: one that is a key already, one that this module names under that string, or a new one of any type."""
    if isinstance(name, Key) and (name.type_path or name not in known()):
        return name
    return (known().get(name) if isinstance(name, str) else None) or Key(name)


def known() -> dict[str, Key[Any]]:
    """Every key that this module names, by its string."""
    return {str(value): value for value in globals().values() if isinstance(value, Key)}
