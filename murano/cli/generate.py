"""``murano lens --generate``: the same question at every token that the model writes."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murano import __version__
from murano.errors import InputError

if TYPE_CHECKING:
    from murano.artifacts.generation_lens import GenerationLensResult
    from murano.model.sampling import Sampling
    from murano.results import Results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a generation."""
    group = parser.add_argument_group("following a generation")
    group.add_argument("--generate", metavar="N", type=int, help="let the model write up to N tokens, and read each")
    group.add_argument("--temperature", metavar="T", type=float, help="draw tokens (default: the most probable one)")
    group.add_argument("--top-p", metavar="P", type=float, help="draw from the most probable ones, P together")
    group.add_argument("--seed", metavar="S", type=int, help="of the draws")
    group.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        dest="stop_texts",  # not "stop": nnsight, once it has traced a model, gives every object a method of that name
        help="end where this was written; may be repeated",
    )
    group.add_argument("--chat", action="store_true", help="the prompt is a user's message: follow the answer")


def sampling_of(args: argparse.Namespace) -> Sampling | None:
    """How to write; ``None`` where nothing is to be written.

    Raises:
        InputError: an argument that can't be used, or one that only ``--generate`` gives a meaning.
    """
    given = {"temperature": args.temperature, "top_p": args.top_p, "seed": args.seed, "stop": args.stop_texts}
    given = {name: value for name, value in given.items() if value is not None}
    if args.generate is None:
        if given or args.chat:
            name = next(iter(given), "chat").replace("_", "-")
            raise InputError(f"--{name} needs --generate N: how many tokens the model is to write.")
        return None
    if args.positions is not None:
        raise InputError("--positions and --generate exclude each other: a generation is read at each token it writes.")
    for name in ("target", "foil"):
        if getattr(args, name) is not None:
            raise InputError(
                f"--{name} and --generate exclude each other: the tokens that are written are what is read."
            )
    if args.plot is not None and Path(args.plot).suffix.lower() == ".html":
        raise InputError(f"--plot {args.plot!r}: a generation has no page. Its figures are one of .png, .pdf, .svg.")
    from murano.model.sampling import Sampling

    return Sampling.of(max_new_tokens=args.generate, **given)


def as_json(lens: GenerationLensResult) -> str:
    """What each layer predicted at every step as strict JSON: a number that is not finite is ``null``."""
    shown = {
        "murano": __version__,
        "model": dict(lens.model),
        "settings": dict(lens.settings),
        "notes": list(lens.notes),
        "prompts": [_prompt(lens, prompt) for prompt in range(lens.n_prompts)],
    }
    return json.dumps(shown, indent=1, allow_nan=False)


def draw(results: Results, file: Path) -> list[str]:
    """The heatmap of one prompt is FILE, those of several are FILE-0, FILE-1 and so on; the agreement is FILE-agreement."""
    from murano import keys
    from murano.plotting import save_figure
    from murano.plotting.generation import generation_figures

    lens = results[keys.GENERATION_LENS]
    return [
        save_figure(figure.draw(bare=True), file.with_stem(f"{file.stem}{name.replace('_', '-')}"))
        for name, figure in generation_figures(lens, "", per_prompt=True)
    ]


def _prompt(lens: GenerationLensResult, prompt: int) -> dict[str, Any]:
    return {
        "prompt": "" if lens.prompts is None else str(lens.prompts[prompt]),
        "text": lens.texts[prompt],
        "finished": lens.finished[prompt],
        "steps": [_step(lens, prompt, step) for step in range(int(lens.steps_mask[prompt].sum()))],
    }


def _step(lens: GenerationLensResult, prompt: int, step: int) -> dict[str, Any]:
    token = int(lens.sampled_ids[prompt, step])
    layers = [
        {
            "address": str(address),
            "predictions": [
                {"id": i, "token": lens.words[i], "prob": _number(p)}
                for i, p in zip(
                    lens.top_ids[layer, prompt, step].tolist(),
                    lens.top_probs[layer, prompt, step].tolist(),
                    strict=True,
                )
            ],
            "prob": _number(float(lens.sampled_probs[layer, prompt, step])),
            "rank": int(lens.sampled_ranks[layer, prompt, step]),
            "agrees": bool(lens.agreement[layer, prompt, step]),
        }
        for layer, address in enumerate(lens.addresses)
    ]
    return {"id": token, "token": lens.words[token], "layers": layers}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
