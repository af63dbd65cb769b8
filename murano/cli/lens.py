"""``murano lens``: what each layer of a model predicts."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murano.cli import generate
from murano.cli.command import add_backend_arguments, add_model_arguments, backend_of, find_model, new_command, say
from murano.errors import InputError

if TYPE_CHECKING:
    from murano.prompts import PromptBatch
    from murano.results import Results
    from murano.steps import Step

EXAMPLES = """\
  murano lens "The capital of France is"
  murano lens "The capital of France is" "The capital of Italy is" --model gpt2
  murano lens --file prompts.txt --layers 20-29 --top-k 10 --json > answers.json
  murano lens "Paris is in" --layers embeddings,all --positions all
  murano lens "The capital of France is" --target Paris --foil Rome
  murano lens "Paris is in" --plot lens.png --save murano_outputs/paris
  murano lens --generate 6 "The capital of France is"
"""


def add_to(commands: Any) -> None:
    """Add the command and its arguments."""
    parser = new_command(commands, "lens", run, "what each layer of a model predicts", EXAMPLES)
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="what the model reads, in quotes")
    parser.add_argument(
        "--file", metavar="FILE", help="more prompts: a .txt file, one to a line, or .jsonl, .json, .csv, .tsv"
    )
    add_backend_arguments(add_model_arguments(parser))
    what = parser.add_argument_group("what to read")
    what.add_argument(
        "--layers",
        metavar="LAYERS",
        default="all",
        help="all, or a list of 3, -1 (the last), 0-5 (5 included), 0:12:2 (a Python slice), L3.resid_pre, embeddings",
    )
    what.add_argument(
        "--positions",
        metavar="POSITIONS",
        help="all, last, or a list of token indices such as 0,-1, 0-2 (2 included) or -3: (default: last; plots and saved runs have all)",
    )
    for kind, help_text in (("target", "the answer"), ("foil", "what the target is compared with")):
        what.add_argument(
            f"--{kind}",
            metavar="WORD",
            action="append",
            help=f"{help_text}, whose probability and rank are read; once for each prompt, in order",
        )
    what.add_argument("--top-k", metavar="K", type=int, default=5, help="tokens to keep per distribution (default: 5)")
    generate.add_arguments(parser)
    out = parser.add_argument_group("what to write")
    out.add_argument("--json", action="store_true", help="JSON instead of tables on standard output")
    out.add_argument(
        "--plot", metavar="FILE", help="draw the heatmap: a .png, .pdf or .svg file; .html is a page to explore"
    )
    out.add_argument(
        "--save",
        metavar="DIR",
        dest="save_dir",  # not "save": nnsight, once it has traced a model, gives every object a method of that name
        help="save the run; 'murano show DIR' and murano.load_run open it",
    )


def run(args: argparse.Namespace) -> int:
    """Check the arguments, read the model, write what was asked for."""
    from murano.cli.outputs import figure_file, run_folder
    from murano.readout.request import parse_layers, parse_positions

    sampling = generate.sampling_of(args)
    backend = backend_of(args)
    prompts = _prompts(args)
    parse_layers(args.layers)
    only_last = args.positions is None
    positions = "last" if only_last else args.positions
    parse_positions(positions)
    if args.top_k < 1:
        raise InputError(f"--top-k {args.top_k} is too few: 1 keeps the predicted token alone.")
    figure = figure_file(args.plot) if args.plot is not None else None
    saved = run_folder(args.save_dir) if args.save_dir is not None else None
    if only_last and (figure or saved):
        positions = "all"  # the table stays what it is

    # Everything that can be wrong without a model has been found: now comes what takes time.
    from murano import Pipeline, keys
    from murano.cli.lens_text import as_json, as_tables
    from murano.steps import FollowGeneration, LoadPrompts, LogitLens, Save

    model = find_model(args.model, dtype=args.dtype, device_map=args.device_map, **backend)
    if sampling is not None:
        how = {name: value for name, value in asdict(sampling).items() if value != ()}
        step: Step = FollowGeneration(model, layers=args.layers, top_k=args.top_k, **how)
    else:
        step = LogitLens(model, args.layers, positions, args.top_k)
    results = Pipeline([LoadPrompts(prompts), step]).run()
    if sampling is not None:
        written = results[keys.GENERATION_LENS]
        print(generate.as_json(written) if args.json else written, flush=True)
    else:
        lens = results[keys.LOGIT_LENS]
        print(as_json(lens, prompts, only_last) if args.json else as_tables(lens, prompts, only_last), flush=True)
    if figure or saved:
        say(args, "")
    try:
        if figure is not None:
            draw = generate.draw if sampling is not None else _draw
            results[keys.PLOTS] = draw(results, figure)
            say(args, f"plot:  {', '.join(results[keys.PLOTS])}")
    finally:  # a figure that fails must not take with it what was read
        if saved is not None:
            folder = Save(saved[0], saved[1], model_id=model.model_id)(results)[keys.OUTPUT_DIR]
            say(args, f"saved: {folder}")
    return 0


def _prompts(args: argparse.Namespace) -> PromptBatch:
    from murano.prompt_files import read_prompt_file
    from murano.prompts import as_prompts, is_prompt_file

    for prompt in filter(is_prompt_file, args.prompts):
        raise InputError(f"{prompt!r} is a file, and would be read as a prompt. Did you mean --file {prompt}?")
    given = [*args.prompts] if not args.chat else [*as_prompts(args.prompts, chat=True)] if args.prompts else []
    given += read_prompt_file(args.file, chat=args.chat) if args.file is not None else []
    if not given:
        raise InputError('There are no prompts. Give one: murano lens "The capital of France is"')
    prompts = as_prompts(given, targets=args.target, foils=args.foil)
    for index, prompt in enumerate(prompts):
        if re.search(r"[\ud800-\udfff]", str(prompt)):  # how Python shows bytes that are no text
            raise InputError(f"Prompt {index} is not UTF-8: {str(prompt)!a:.80}")
    return prompts


def _draw(results: Results, file: Path) -> list[str]:
    """The heatmap of one prompt is FILE, those of a few are FILE-0, FILE-1 and so on; many are in one overview.

    A page has them all.
    """
    from murano import keys

    lens = results[keys.LOGIT_LENS]
    if file.suffix.lower() == ".html":
        from murano.plotting import lens_page

        lens_page(lens, file)
        return [str(file)]
    from murano.plotting import save_figure
    from murano.plotting.lens import lens_grid
    from murano.plotting.overview import overview_grid
    from murano.plotting.results import MOST_PROMPTS

    if lens.n_prompts == 1:
        grids = {file: lens_grid(lens)}
    elif lens.n_prompts > MOST_PROMPTS:
        grids = {file: overview_grid(lens)}
    else:
        grids = {file.with_stem(f"{file.stem}-{i}"): lens_grid(lens, i) for i in range(lens.n_prompts)}
    return [save_figure(grid.draw(bare=True), path) for path, grid in grids.items()]
