"""Files and folders that a command is to write: refused before any work is done if they can't be."""

from __future__ import annotations

import itertools
import os
import shlex
from importlib.util import find_spec
from pathlib import Path

from murano.artifacts.folder import check_name, check_writable
from murano.errors import ArtifactError, InputError, MissingExtraError

#: What ``--plot`` can write.
FIGURES = (".png", ".pdf", ".svg", ".html")


def figure_file(name: str, page: bool = True) -> Path:
    """The file of ``--plot``.

    Args:
        name: as it was typed.
        page: whether there is an interactive page of what is drawn.

    Raises:
        InputError: it is no figure, or can't be written.
        MissingExtraError: nothing that draws is installed.
    """
    path = Path(name)
    allowed = FIGURES if page else FIGURES[:-1]
    if path.suffix.lower() not in allowed:
        raise InputError(f"--plot {name!r}: a figure {'' if page else 'of this '}is one of {', '.join(allowed)}.")
    if path.is_dir():
        raise InputError(f"--plot {name!r} is a folder: give the name of a file.")
    _check_folder(Path(os.path.abspath(path)).parent, f"--plot {name!r}")
    if path.suffix.lower() != ".html" and find_spec("matplotlib") is None:
        raise MissingExtraError("--plot", "plot")
    return path


def run_folder(name: str) -> tuple[Path, str]:
    """The folder of ``--save``: the folder that it is in, and its own name.

    Raises:
        InputError: it is a file, is in use for something else, or can't be written.
        ArtifactError: its name can't be that of a run.
    """
    path = Path(os.path.abspath(name))  # so that "." has a name, too
    check_name(path.name, "The run's folder")
    if path.exists() and not path.is_dir():
        raise InputError(f"--save {name!r} is a file: give the name of a folder.")
    if path.is_dir() and not _takes_a_run(path):
        raise InputError(
            f"--save {name!r} is a folder of something else, and a run has one of its own. Write: --save {_fresh(name)}"
        )
    _check_folder(path, f"--save {name!r}")
    return (Path(name).parent, path.name) if Path(name).name == path.name else (path.parent, path.name)


def _takes_a_run(folder: Path) -> bool:
    """Whether a folder is empty or holds a run."""
    from murano.artifacts.run_manifest import read_manifest  # here: it imports torch

    try:
        if not any(folder.iterdir()):  # but a folder that one is in can't be swapped
            return not Path.cwd().is_relative_to(folder.resolve())
        read_manifest(folder)
    except (ArtifactError, OSError):
        return False
    return True


def _fresh(folder: str) -> str:
    """A name in a folder that nothing has yet, as one would type it."""
    names = itertools.chain(["run"], (f"run-{number}" for number in itertools.count(2)))
    return shlex.quote(next(str(path) for name in names if not (path := Path(folder, name)).exists()))


def _check_folder(folder: Path, what: str) -> None:
    there = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not there.is_dir():
        raise InputError(f"{what} can't be written: {str(there)!r} is no folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{what} can't be written: there is no permission to write into {str(there)!r}.")
    check_writable(there)
