"""``murano attribute``: which components put the answer there."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murano.cli.command import add_model_arguments, find_model, new_command, say
from murano.errors import InputError

if TYPE_CHECKING:
    from murano.artifacts.logit_attribution import LogitAttributionResult, TopComponents
    from murano.prompts import PromptBatch

EXAMPLES = """\
  murano attribute "The capital of France is" --target Paris
  murano attribute "The capital of France is" --target Paris --foil London --by head
  murano attribute --file facts.jsonl --json > shares.json
  murano attribute "The capital of France is" --target Paris --plot shares.png --save murano_outputs/paris"""


def add_to(commands: Any) -> None:
    """Add the command and its arguments."""
    parser = new_command(commands, "attribute", run, "which components put the answer there", EXAMPLES)
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="what the model reads, in quotes")
    parser.add_argument("--file", metavar="FILE", help="more prompts, with their targets: .jsonl, .json or .csv")
    parser.add_argument(
        "--target", metavar="TEXT", action="append", help="the answer of a PROMPT; once for each of them"
    )
    parser.add_argument(
        "--foil", metavar="TEXT", action="append", help="what the target is compared with; once for each PROMPT"
    )
    add_model_arguments(parser)
    for option in ("--backend", "--engine"):  # so that the error says why there is none
        parser.add_argument(option, help=argparse.SUPPRESS)
    how = parser.add_argument_group("what to read")
    how.add_argument(
        "--by",
        default="component",
        help="how finely: layer, component (attention and MLP apart), head, neuron_topk (default: component)",
    )
    how.add_argument("--top-k", metavar="K", type=int, default=10, help="components to list (default: 10)")
    out = parser.add_argument_group("what to write")
    out.add_argument("--json", action="store_true", help="JSON of all components instead of tables on standard output")
    out.add_argument("--plot", metavar="FILE", help="draw how the logit adds up: a .png, .pdf or .svg file")
    out.add_argument("--save", metavar="DIR", dest="save_dir", help="save the run; 'murano show DIR' opens it")


def run(args: argparse.Namespace) -> int:
    """Check the arguments, attribute, write what was asked for."""
    from murano.cli.outputs import figure_file, run_folder
    from murano.readout.request import check_attribution

    if args.engine is not None or args.backend not in (None, "eager"):
        raise InputError(
            "murano attribute follows the logit back through the model's weights, which a vLLM engine keeps to itself: leave "
            "--backend and --engine out."
        )
    prompts = _prompts(args)
    check_attribution(args.by, "last", 1)
    if args.top_k < 1:
        raise InputError(f"--top-k {args.top_k} is too few: 1 lists the component that weighs most.")
    figure = figure_file(args.plot, page=False) if args.plot is not None else None
    saved = run_folder(args.save_dir) if args.save_dir is not None else None

    from murano import Pipeline, keys
    from murano.steps import LoadPrompts, LogitAttribution, Save

    model = find_model(args.model, dtype=args.dtype, device_map=args.device_map)
    results = Pipeline([LoadPrompts(prompts), LogitAttribution(model, by=args.by)]).run()
    found = results[keys.LOGIT_ATTRIBUTION]
    print(as_json(found) if args.json else as_tables(found, args.top_k), flush=True)
    if figure or saved:
        say(args, "")
    if saved is not None:  # first: whatever a figure comes to, the numbers are kept
        folder = Save(saved[0], saved[1], model_id=model.model_id)(results)[keys.OUTPUT_DIR]
        say(args, f"saved: {folder}")
    if figure is not None:
        say(args, f"plot:  {', '.join(_draw(found, figure))}")
    return 0


def as_tables(found: LogitAttributionResult, k: int) -> str:
    """The components that weigh most for each prompt, and with several in the mean."""
    parts = []
    for prompt in range(found.n_prompts):
        text = str(found.prompts[prompt]) if found.prompts is not None else ""
        parts += [f"prompt: {text!r}", repr(_top(found, k, prompt))]
        if found.neurons is not None:
            parts += ["neurons:", repr(found.top_neurons(k, prompt=prompt, of=_of(found, prompt)))]
    if found.n_prompts > 1:
        parts.append(repr(found.top(k)))
    return "\n\n".join(parts)


def _top(found: LogitAttributionResult, k: int, prompt: int) -> TopComponents:
    return found.top(k, prompt=prompt, of=_of(found, prompt))


def _of(found: LogitAttributionResult, prompt: int) -> str:
    foil = found.answer_ids.shape[1] > found.n_targets and int(found.answer_ids[prompt, found.n_targets]) >= 0
    return "difference" if foil else "target"


def as_json(found: LogitAttributionResult) -> str:
    """All contributions as strict JSON."""
    answers = [f"target {i}" for i in range(found.n_targets)]
    answers += [f"foil {i}" for i in range(found.answer_ids.shape[1] - found.n_targets)]
    shown = []
    for prompt in range(found.n_prompts):
        of = []
        for column, name in enumerate(answers):
            token = int(found.answer_ids[prompt, column])
            if token < 0:
                continue
            values = found.contributions[prompt, -1, column].tolist()
            of.append(
                {
                    "answer": name,
                    "id": token,
                    "token": found.words[token],
                    "logit": _number(float(found.logits[prompt, -1, column])),
                    "model_logit": _number(float(found.model_logits[prompt, -1, column])),
                    "leftover": _number(float(found.leftover[prompt, -1, column])),
                    "contributions": {str(a): _number(v) for a, v in zip(found.components, values, strict=True)},
                    **_neurons(found, prompt, column),
                }
            )
        shown.append({"prompt": str(found.prompts[prompt]) if found.prompts is not None else "", "answers": of})
    about = {"model": dict(found.model), "by": found.by, "soft_cap": found.cap, "notes": list(found.notes)}
    return json.dumps({**about, "prompts": shown}, indent=1, allow_nan=False)


def _neurons(found: LogitAttributionResult, prompt: int, column: int) -> dict[str, Any]:
    if found.neurons is None or found.neuron_index is None:
        return {}
    pairs = zip(found.neuron_index[prompt, -1].tolist(), found.neurons[prompt, -1, column].tolist(), strict=True)
    return {"neurons": {f"L{layer}.mlp_out.n{neuron}": _number(v) for (layer, neuron), v in pairs if layer >= 0}}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _prompts(args: argparse.Namespace) -> PromptBatch:
    from murano.prompt_files import read_prompt_file
    from murano.prompts import as_prompts

    given = list(as_prompts(args.prompts, targets=args.target, foils=args.foil)) if args.prompts else []
    if not args.prompts and (args.target or args.foil):
        raise InputError("--target and --foil belong to a PROMPT; a file says its own.")
    given += read_prompt_file(args.file) if args.file is not None else []
    if not given:
        raise InputError('There are no prompts. Give one: murano attribute "The capital of France is" --target Paris')
    for index, prompt in enumerate(given):
        if not prompt.targets:
            how = "--target Paris" if index < len(args.prompts) else f"in {args.file}, as the field 'target'"
            raise InputError(f"Prompt {index} has no target: {str(prompt)!r:.60}. Give it: {how}")
    return as_prompts(given)


def _draw(found: LogitAttributionResult, file: Path) -> list[str]:
    """The waterfall of one prompt, or of the mean, is FILE; by heads there is their heatmap FILE-heads, too."""
    from murano.plotting import save_figure
    from murano.plotting.attribution import waterfall
    from murano.plotting.attribution_grid import attribution_grid

    files = [save_figure(waterfall(found, 0 if found.n_prompts == 1 else None).draw(bare=True), file)]
    if found.by == "head":
        files.append(save_figure(attribution_grid(found).draw(bare=True), file.with_stem(f"{file.stem}-heads")))
    return files
