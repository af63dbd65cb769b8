"""``murano show``: what is in a saved run, or the curves of a document's run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from murano.cli.command import new_command, say
from murano.errors import InputError

EXAMPLES = """\
  murano show murano_outputs/paris
  murano show murano_outputs/paris --verify
  murano show out/logit_lens --metric p_answer --plot curve.png"""

#: What ``--plot`` can write.
CURVES = (".png", ".pdf", ".svg")


def add_to(commands: Any) -> None:
    """Add the command and its arguments."""
    parser = new_command(commands, "show", run, "what is in a saved run, or the curves of a document's run", EXAMPLES)
    parser.add_argument("dir", metavar="DIR", help="the run's folder")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare every file with what was saved; exit code 1 if one differs or is missing",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="of a document's run: only this metric, by its name or its file's (default: all)",
    )
    parser.add_argument("--plot", metavar="FILE", help="of a document's run: draw the curve, a .png, .pdf or .svg file")


def run(args: argparse.Namespace) -> int:
    """Print what is in the run, and whether it is whole."""
    from murano.documents.runs import check_folder, is_run

    check_folder(Path(args.dir))
    if is_run(args.dir):
        return _show_document_run(args)
    for option in ("metric", "plot"):
        if getattr(args, option) is not None:
            raise InputError(f"--{option} is for the run of a document, and {args.dir!r} is none: it has no run.json.")
    from murano.artifacts.run import verify_run
    from murano.show import show

    print(show(args.dir))
    if not args.verify:
        return 0
    check = verify_run(args.dir)
    print(check)
    return 0 if check.ok else 1


def _show_document_run(args: argparse.Namespace) -> int:
    from murano.cli.outputs import figure_file
    from murano.documents.runs import find_faults, open_run, saved_name

    figure = None
    if args.plot is not None:
        if Path(args.plot).suffix.lower() not in CURVES:
            raise InputError(f"--plot {args.plot!r}: a curve is one of {', '.join(CURVES)}.")
        figure = figure_file(args.plot)
    faults = find_faults(Path(args.dir)) if args.verify else {}
    if "document.json" not in faults:  # or nothing says what the numbers are of
        found = open_run(args.dir)
        metrics = found.metrics if args.metric is None else (saved_name(found, args.metric),)
        if figure is not None and not found.points:
            raise InputError(f"--plot {args.plot!r}: no point of this run is finished, so there is no curve to draw.")

        from murano.cli.curves import as_text, draw

        damaged = {Path(name).with_suffix("").as_posix() for name in faults}
        whole = tuple(m for m in metrics if not any((Path(p) / m).as_posix() in damaged for p in found.points))
        print(as_text(found, whole if found.points else ()))
        if figure is not None and whole:
            say(args, f"plot: {', '.join(draw(found, whole, figure))}")
    if not args.verify:
        return 0
    for name, fault in faults.items():
        print(f"{name}: {fault}")
    if not faults:
        print(f"{args.dir}: all files are as they were written.")
    return 1 if faults else 0
