"""``murano validate``, ``murano explain``, ``murano run``: an experiment as a document."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from murano.cli.command import add_backend_arguments, backend_of, new_command, say
from murano.errors import InputError, MuranoError

if TYPE_CHECKING:
    from murano.documents import Document

VALIDATE = """\
  murano validate logit_lens.json
  murano validate documents/*.yaml
  murano validate --schema > murano.schema.json"""
EXPLAIN = """\
  murano explain logit_lens.json"""
RUN = """\
  murano run logit_lens.json --out out/logit_lens
  murano run out/logit_lens/layers=0/document.json --out out/first_layer"""


def add_to(commands: Any) -> None:
    """Add the three commands and their arguments."""
    check = new_command(commands, "validate", validate, "all that is wrong with a document", VALIDATE)
    check.add_argument("documents", metavar="DOC", nargs="*", help="a .json or .yaml file")
    check.add_argument("--schema", action="store_true", help="print the JSON Schema of documents, for editors")
    explain_it = new_command(commands, "explain", explain, "what a document will run, as a tree", EXPLAIN)
    explain_it.add_argument("document", metavar="DOC", help="a .json or .yaml file")
    run_it = new_command(commands, "run", run, "run a document into a folder", RUN)
    run_it.add_argument("document", metavar="DOC", help="a .json or .yaml file")
    run_it.add_argument(
        "--out", metavar="DIR", required=True, help="the folder; a run in it that was interrupted goes on"
    )
    run_it.add_argument("--force", action="store_true", help="start over, whatever run the folder holds")
    add_backend_arguments(run_it)


def validate(args: argparse.Namespace) -> int:
    """Print what is wrong with each document, everything at once."""
    from murano import documents

    if args.schema:
        print(json.dumps(documents.json_schema(), indent=2))
        return 0
    if not args.documents:
        raise InputError("There is no document. Give one: murano validate logit_lens.json")
    bad = 0
    for name in args.documents:
        try:
            document = documents.load(name)
        except MuranoError as error:
            print(f"murano: error: {error}", file=sys.stderr)
            bad += 1
        else:
            print(f"{name}: valid, {_size(document)}")
    return 2 if bad else 0


def explain(args: argparse.Namespace) -> int:
    """Print the plan."""
    from murano import documents

    with _said() as refused:
        print(documents.load(args.document).plan())
    return 2 if refused else 0


def run(args: argparse.Namespace) -> int:
    """Run the document, and list what was written."""
    from murano import documents

    backend = backend_of(args)
    with _said() as refused:
        document = documents.load(args.document)
        done = document.run(args.out, force=args.force, model=document.open_model(**backend))
        names = ["document.json", "run.json", *(n for p in done.info["points"].values() for n in p["files"])]
        for name in dict.fromkeys(names):
            print(f"{args.out}/{name}")
        say(args, f"The curves: murano show {args.out}")
    return 2 if refused else 0


@contextlib.contextmanager
def _said() -> Iterator[list[str]]:
    """Print all that is wrong with a document, a problem to a line; what is yielded is empty if nothing is."""
    from murano import documents

    said: list[str] = []
    try:
        yield said
    except documents.DocumentError as error:
        said.append(f"murano: error: {error}")
        print(said[0], file=sys.stderr)


def _size(document: Document) -> str:
    spec = document.spec
    steps, saves = len(spec.steps), sum(len(step.saves) for step in spec.steps.values())
    return f"{steps} step{'s' if steps != 1 else ''}, {saves} file{'s' if saves != 1 else ''} a point"
