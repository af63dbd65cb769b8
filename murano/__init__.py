"""Murano: look inside language models. Public names are imported when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from murano._lazy import lazy_exports

__version__ = "0.1.0"

if TYPE_CHECKING:
    from murano import errors as errors
    from murano import keys as keys
    from murano import metrics as metrics
    from murano.address import Address as Address
    from murano.artifacts.codec import fingerprint as fingerprint
    from murano.artifacts.generation_lens import GenerationLensResult as GenerationLensResult
    from murano.artifacts.logit_attribution import LogitAttributionResult as LogitAttributionResult
    from murano.artifacts.logit_lens import LogitLensResult as LogitLensResult
    from murano.artifacts.metric_table import MetricTable as MetricTable
    from murano.artifacts.run import load_logit_lens as load_logit_lens
    from murano.artifacts.run import load_prompts as load_prompts
    from murano.artifacts.run import load_result as load_result
    from murano.artifacts.run import load_run as load_run
    from murano.artifacts.run import save_run as save_run
    from murano.artifacts.run import verify_run as verify_run
    from murano.artifacts.store import load_artifact as load_artifact
    from murano.artifacts.store import save_artifact as save_artifact
    from murano.attribution import logit_attribution as logit_attribution
    from murano.errors import ArtifactError as ArtifactError
    from murano.errors import InputError as InputError
    from murano.errors import MissingExtraError as MissingExtraError
    from murano.errors import MissingKeyError as MissingKeyError
    from murano.errors import ModelError as ModelError
    from murano.errors import MuranoError as MuranoError
    from murano.errors import PipelineError as PipelineError
    from murano.errors import ReadoutError as ReadoutError
    from murano.errors import UnsupportedModelError as UnsupportedModelError
    from murano.generation import follow_generation as follow_generation
    from murano.keys import Key as Key
    from murano.lens import logit_lens as logit_lens
    from murano.lens import reread as reread
    from murano.model import MuranoModel as MuranoModel
    from murano.pipeline import Pipeline as Pipeline
    from murano.prompt_files import read_prompt_file as read_prompt_file
    from murano.prompt_files import shipped_prompts as shipped_prompts
    from murano.prompts import Prompt as Prompt
    from murano.prompts import PromptBatch as PromptBatch
    from murano.results import Results as Results
    from murano.steps.base import Step as Step
    from murano.steps.base import step as step
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "murano.address": ["Address"],
            "murano.artifacts.codec": ["fingerprint"],
            "murano.artifacts.generation_lens": ["GenerationLensResult"],
            "murano.artifacts.logit_attribution": ["LogitAttributionResult"],
            "murano.artifacts.logit_lens": ["LogitLensResult"],
            "murano.artifacts.metric_table": ["MetricTable"],
            "murano.artifacts.run": [
                "load_logit_lens",
                "load_prompts",
                "load_result",
                "load_run",
                "save_run",
                "verify_run",
            ],
            "murano.artifacts.store": ["load_artifact", "save_artifact"],
            "murano.attribution": ["logit_attribution"],
            "murano.errors": [
                "ArtifactError",
                "InputError",
                "MissingExtraError",
                "MissingKeyError",
                "ModelError",
                "MuranoError",
                "PipelineError",
                "ReadoutError",
                "UnsupportedModelError",
            ],
            "murano.generation": ["follow_generation"],
            "murano.keys": ["Key"],
            "murano.lens": ["logit_lens", "reread"],
            "murano.model": ["MuranoModel"],
            "murano.pipeline": ["Pipeline"],
            "murano.prompt_files": ["read_prompt_file", "shipped_prompts"],
            "murano.prompts": ["Prompt", "PromptBatch"],
            "murano.results": ["Results"],
            "murano.steps.base": ["Step", "step"],
        },
        modules=["errors", "keys", "metrics"],
    )
