"""``murano show``: what is in a saved run, or the curves of a document's run."""

from __future__ import annotations

import argparse
from typing import Any

from murano.cli.command import new_command, say
from murano.errors import InputError, nearest

EXAMPLES = """\
  murano show murano_outputs/paris
  murano show murano_outputs/paris --verify
  murano show out/logit_lens --metric p_answer --plot curve.png"""


def add_to(commands: Any) -> None:
    """Add the command and its arguments."""
    parser = new_command(commands, "show", run, "what is in a saved run, or the curves of a document's run", EXAMPLES)
    parser.add_argument("dir", metavar="DIR", help="the run's folder")
    parser.add_argument(
        "--verify", action="store_true", help="compare every file with what was saved; exit code 1 if one differs"
    )
    parser.add_argument("--metric", metavar="NAME", help="of a document's run: only this one (default: all)")
    parser.add_argument("--plot", metavar="FILE", help="of a document's run: draw the curve, a .png, .pdf or .svg file")


def run(args: argparse.Namespace) -> int:
    """Print what is in the run, and whether it is whole."""
    from murano.documents.runs import is_run

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
    from murano.documents.runs import open_run

    found = open_run(args.dir)
    metrics = found.metrics if args.metric is None else (args.metric,)
    if args.metric is not None and args.metric not in found.metrics:
        raise InputError(
            f"--metric {args.metric!r}: the run has {', '.join(found.metrics) or 'none yet'}.{nearest(args.metric, found.metrics)}"
        )
    figure = figure_file(args.plot) if args.plot is not None else None

    from murano.cli.curves import as_text, draw

    print(as_text(found, metrics if found.points else ()))
    if figure is not None and found.points:
        say(args, f"plot: {', '.join(draw(found, metrics, figure))}")
    if not args.verify:
        return 0
    faults = found.faults()
    for name, fault in faults.items():
        print(f"{name}: {fault}")
    if not faults:
        print(f"{args.dir}: all files are as they were written.")
    return 1 if faults else 0
