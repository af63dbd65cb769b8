"""Shell completion: each shell takes the script, and offers what the command line has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from murano.cli import main, parser
from murano.cli.completion import SHELLS, script

NAMES = list(parser().commands)


def in_shell(shell: str, code: str) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_has_every_command_and_its_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    for word in (*NAMES, "top-k", "verify", "float32", "bfloat16"):
        assert word in out


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_can_read_it(shell: str, tmp_path: Path) -> None:
    file = tmp_path / "murano"
    file.write_text(script(shell), encoding="utf-8")
    assert in_shell(shell, f"{shell} -n {file}") == []


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["lens", "--pl"], ["--plot"]),
        (["sh"], ["show"]),
        (["lens", "--dtype", ""], ["float32", "bfloat16", "float16"]),
        (["completion", ""], list(SHELLS)),
    ],
)
def test_bash_completes(words: list[str], offered: list[str], tmp_path: Path) -> None:
    file = tmp_path / "murano"
    file.write_text(script("bash"), encoding="utf-8")
    line = " ".join(["murano", *(word or "''" for word in words)])
    code = f"""source {file}; COMP_WORDS=({line}); COMP_CWORD={len(words)}
    _shtab_murano murano "${{COMP_WORDS[-1]}}" "${{COMP_WORDS[-2]}}"; printf '%s\\n' "${{COMPREPLY[@]}}" """
    found = in_shell("bash", code)
    assert [word for word in found if not word.startswith("-") or words[-1].startswith("-")] == offered


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "ksh"]) == 2
    err = capsys.readouterr().err
    assert "ksh" in err and "See: murano completion --help" in err


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["lense", "Hello"], "Did you mean 'lens'? See: murano --help"),
        (["lens", "Hello", "--plto", "x.png"], "murano lens takes no '--plto'. Did you mean '--plot'?"),
        (["lens", "Hello", "--layer=3"], None),  # argparse takes an unambiguous beginning of an option
        (["show", "run", "another"], "murano show takes no 'another'. See: murano show --help"),
        (["lens", "Hello", "--dtype", "float31"], "Did you mean 'float32'? See: murano lens --help"),
    ],
)
def test_a_misspelt_word_is_told_the_nearest(
    typed: list[str], says: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if says is None:
        assert parser().parse_args(typed).layers == "3"
    else:
        assert main(typed) == 2
        assert says in capsys.readouterr().err
