"""``murano completion``: what a shell needs to complete commands, options and files."""

from __future__ import annotations

import argparse
from typing import Any

from murano.cli.command import new_command

EXAMPLES = """\
  murano completion bash > ~/.local/share/bash-completion/completions/murano
  murano completion zsh > ~/.zfunc/_murano    # with: fpath+=~/.zfunc before compinit
  murano completion fish > ~/.config/fish/completions/murano.fish"""

SHELLS = ("bash", "zsh", "fish")
#: What the shell offers for an argument, by how its help calls it.
_FILES = {"FILE": "FILE", "SRC": "FILE", "MODEL": "FILE", "DIR": "DIRECTORY"}


def add_to(commands: Any) -> None:
    """Add the command and its arguments."""
    parser = new_command(commands, "completion", run, "let a shell complete murano's commands and options", EXAMPLES)
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")


def run(args: argparse.Namespace) -> int:
    """Print the script for a shell."""
    print(script(args.shell))
    return 0


def script(shell: str) -> str:
    """The completion script of a shell.

    Args:
        shell: one of :data:`SHELLS`.
    """
    import shtab

    from murano.cli import parser

    whole = parser()
    for command in whole.commands.values():
        for action in command._actions:
            if isinstance(action.metavar, str) and action.metavar in _FILES:
                action.complete = getattr(shtab, _FILES[action.metavar])  # type: ignore[attr-defined]
    text: str = shtab.complete(whole, shell=shell)
    return text
