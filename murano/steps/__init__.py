"""The steps of a pipeline, imported when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from murano._lazy import lazy_exports

if TYPE_CHECKING:
    from murano.steps.base import Step as Step
    from murano.steps.base import step as step
    from murano.steps.follow_generation import FollowGeneration as FollowGeneration
    from murano.steps.load_prompts import LoadPrompts as LoadPrompts
    from murano.steps.logit_attribution import LogitAttribution as LogitAttribution
    from murano.steps.logit_lens import LogitLens as LogitLens
    from murano.steps.metrics import Commitment as Commitment
    from murano.steps.metrics import LogitDiff as LogitDiff
    from murano.steps.metrics import Match as Match
    from murano.steps.metrics import PredictionDepth as PredictionDepth
    from murano.steps.metrics import Rank as Rank
    from murano.steps.metrics import TokenProb as TokenProb
    from murano.steps.plot import Plot as Plot
    from murano.steps.save import Save as Save
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "murano.steps.base": ["Step", "step"],
            "murano.steps.follow_generation": ["FollowGeneration"],
            "murano.steps.load_prompts": ["LoadPrompts"],
            "murano.steps.logit_attribution": ["LogitAttribution"],
            "murano.steps.logit_lens": ["LogitLens"],
            "murano.steps.metrics": ["Commitment", "LogitDiff", "Match", "PredictionDepth", "Rank", "TokenProb"],
            "murano.steps.plot": ["Plot"],
            "murano.steps.save": ["Save"],
        },
    )
