"""What all commands share: how they parse, and how they find a model."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from murano.errors import InputError, nearest

if TYPE_CHECKING:
    from murano import MuranoModel

#: How the command line calls the model that needs no download.
BUNDLED = "bundled"


class Parser(argparse.ArgumentParser):
    """Reports bad arguments as everything else that is bad: by an error, in one line."""

    #: The parsers of its commands, by name.
    commands: Mapping[str, Parser] = {}

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found.

        Raises:
            InputError: always.
        """
        choice = re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message)
        hint = nearest(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else ""
        raise InputError(f"{message[:1].upper()}{message[1:]}.{hint} See: {self.prog} --help")

    def refuse(self, unknown: str) -> NoReturn:
        """Refuse an argument that this command does not take.

        Raises:
            InputError: always.
        """
        hint = nearest(unknown.partition("=")[0], self._option_string_actions)
        raise InputError(f"{self.prog} takes no {unknown!r}.{hint} See: {self.prog} --help")


def add_model_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the arguments that say which model, and how it is loaded; returns their group."""
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--model",
        metavar="SRC",
        default=BUNDLED,
        help="a model's folder, a .gguf file, or a hub id such as gpt2 (default: the bundled model)",
    )
    model.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights (default: the checkpoint's own)",
    )
    model.add_argument("--device-map", metavar="MAP", help="where the weights go, as transformers takes it: cuda, auto")
    return model


def add_backend_arguments(group: argparse._ActionsContainer) -> None:
    """Add the arguments that say where the model runs."""
    group.add_argument(
        "--backend",
        choices=("eager", "vllm"),
        default="eager",
        help="eager: transformers, in this process (the default); vllm: a vLLM engine, see docs/vllm.md",
    )
    group.add_argument(
        "--engine",
        metavar="JSON",
        type=_engine,
        default={},
        help="with --backend vllm: arguments of its engine, such as '{\"tensor_parallel_size\": 2}'",
    )


def _engine(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no JSON object, such as '{{\"tensor_parallel_size\": 2}}' in single quotes"
        )
    return found


def backend_of(args: argparse.Namespace) -> dict[str, Any]:
    """Where the model runs, as :class:`murano.MuranoModel` takes it.

    Raises:
        InputError: engine arguments without an engine.
    """
    if args.engine and args.backend != "vllm":
        raise InputError(f"--engine {json.dumps(args.engine)} is for vLLM's engine: add --backend vllm.")
    return {"backend": args.backend, **args.engine}


def new_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command.

    Args:
        commands: what ``add_subparsers`` returned.
        name: what the user types.
        run: does the work, and returns the exit code.
        summary: what it does, in a few words.
        examples: lines to copy.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument("-q", "--quiet", action="store_true", help="no progress and no notices on standard error")
    loudness.add_argument("-v", "--verbose", action="store_true", help="also what the libraries under Murano log")
    parser.set_defaults(run=run, command=name)
    return parser


def join_negative(argv: Sequence[str]) -> list[str]:
    """``--layers -1,0`` as ``--layers=-1,0``: argparse would take the list for an option.

    >>> join_negative(["lens", "--layers", "-1,0"])
    ['lens', '--layers=-1,0']
    """
    joined: list[str] = []
    for argument in argv:
        if joined and joined[-1] in ("--layers", "--positions") and re.match(r"-\d", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def find_model(name: str, **options: Any) -> MuranoModel:
    """The model that ``--model`` names; its weights load later."""
    from murano import MuranoModel

    return MuranoModel(None if name == BUNDLED else name, **options)


def say(args: argparse.Namespace, line: str) -> None:
    """A line on standard error, unless ``--quiet``."""
    if not args.quiet:
        print(line, file=sys.stderr)
