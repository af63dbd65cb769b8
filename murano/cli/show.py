"""``murano show``: what is in a saved run."""

from __future__ import annotations

import argparse
from typing import Any

from murano.cli.command import new_command

EXAMPLES = """\
  murano show murano_outputs/paris
  murano show murano_outputs/paris --verify"""


def add_to(commands: Any) -> None:
    """Add the command and its arguments."""
    parser = new_command(commands, "show", run, "what is in a saved run", EXAMPLES)
    parser.add_argument("dir", metavar="DIR", help="the run's folder")
    parser.add_argument(
        "--verify", action="store_true", help="compare every file with what was saved; exit code 1 if one differs"
    )


def run(args: argparse.Namespace) -> int:
    """Print what is in the run, and whether it is whole."""
    from murano.artifacts.run import verify_run
    from murano.show import show

    print(show(args.dir))
    if not args.verify:
        return 0
    check = verify_run(args.dir)
    print(check)
    return 0 if check.ok else 1
