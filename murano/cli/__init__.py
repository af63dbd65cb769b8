"""The command line: ``murano lens``, ``attribute``, ``run``, ``validate``, ``explain``, ``show``, ``doctor``, ``completion``.

What costs time is imported by a command when its arguments have been checked: ``murano --help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from murano import __version__
from murano.cli import attribute, completion, doctor, documents, lens, show
from murano.cli.command import Parser, join_negative
from murano.cli.notices import notices
from murano.errors import MuranoError

#: The modules of the commands, in the order of ``murano --help``.
COMMANDS = (lens, attribute, documents, show, doctor, completion)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after ``murano``; those of the process by default.

    Returns:
        The exit code: 0 done, 1 a saved run is damaged, 2 bad input, 130 interrupted, 141 nobody reads the output.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a token that the terminal can't show is no reason to stop
            stream.reconfigure(errors="backslashreplace")
    try:
        whole = parser()
        args, unknown = whole.parse_known_args(join_negative(sys.argv[1:] if argv is None else argv))
        if unknown:
            whole.commands[args.command].refuse(unknown[0])
        with notices(verbose=args.verbose, quiet=args.quiet):
            code: int = args.run(args)
        sys.stdout.flush()
        return code
    except MuranoError as error:
        return _fail(" ".join(str(error).split()), 2)
    except KeyboardInterrupt as stop:
        return _fail(str(stop), 130)
    except BrokenPipeError:
        # Python flushes standard output once more when it ends: that too would fail, and say so.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def parser() -> Parser:
    """The parser of all commands; each puts the function that runs it under ``run``."""
    whole = Parser(
        prog="murano",
        description="Look inside language models: see at which layer an answer appears.",
        epilog='example:\n  murano lens "The capital of France is"\n\n"murano COMMAND --help" explains a command.',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"murano {__version__}")
    commands = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add_to(commands)
    whole.commands = commands.choices
    return whole


def _fail(message: str, code: int) -> int:
    if message:
        print(f"murano: error: {message}", file=sys.stderr)
    return code
