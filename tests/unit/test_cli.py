"""The command line: what is typed, what is printed, and what is said when it can't be done."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from murano import __version__, load_run, logit_lens
from murano.artifacts.run import save_run
from murano.cli import main, parser
from murano.cli.outputs import figure_file, run_folder
from murano.errors import ArtifactError, InputError, MissingExtraError
from murano.model import MuranoModel

PROMPTS = ["The capital of France is", "Paris is in"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model as a folder."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any use of a model fails: what is refused here is refused before one is looked for."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was looked for")

    monkeypatch.setattr(MuranoModel, "__init__", refuse)


def strict(text: str) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def murano(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, in UTF-8."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "murano", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False, **options)


# murano lens


@pytest.mark.parametrize("option", ["--layers", "--positions"])
def test_a_list_that_begins_with_a_minus(option: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lens", PROMPTS[0], "--model", folder, option, "-1,0", "--json"]) == 0
    position = strict(capsys.readouterr().out)["prompts"][0]["positions"]
    if option == "--layers":
        assert [layer["address"] for layer in position[0]["layers"]] == ["L2.resid_post", "L0.resid_post"]
    else:
        assert [p["position"] for p in position] == [4, 0]


def test_a_table_per_prompt(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lens", *PROMPTS, "--model", folder]) == 0
    out, err = capsys.readouterr()
    model = MuranoModel(folder)
    expected = []
    for prompt in PROMPTS:
        expected.append(f"prompt: {prompt!r}\n\n{logit_lens(model, prompt).table()}")
    assert out == "\n\n".join(expected) + "\n"
    assert "murano:" not in err


def test_tables_of_several_positions(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lens", *PROMPTS, "--model", folder, "--positions", "all", "--layers", "-1"]) == 0
    out = capsys.readouterr().out
    for line in ("position 0: 'The'", "position 4: ' is'", "position 0: 'Paris'", "position 2: ' in'"):
        assert line in out
    assert out.count("position ") == 8  # five tokens and three: the padding is not shown


def test_prompts_from_a_file(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"{PROMPTS[1]}\n\n{PROMPTS[0]}\n")
    assert main(["lens", "The city", "--file", str(file), "--model", folder, "--json"]) == 0
    shown = strict(capsys.readouterr().out)
    assert [prompt["prompt"] for prompt in shown["prompts"]] == ["The city", PROMPTS[1], PROMPTS[0]]


@pytest.mark.usefixtures("no_model")
def test_a_file_without_its_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text(PROMPTS[0])
    assert main(["lens", "prompts.txt"]) == 2
    assert capsys.readouterr().err.endswith("would be read as a prompt. Did you mean --file prompts.txt?\n")


def test_json(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lens", *PROMPTS, "--model", folder, "--top-k", "3", "--json", "--layers", "embeddings,all"]) == 0
    shown = strict(capsys.readouterr().out)
    lens = logit_lens(MuranoModel(folder), PROMPTS, layers=["embeddings", "all"], top_k=3)
    assert shown["model"]["model_id"] == Path(folder).name
    assert len(shown["prompts"]) == 2
    for prompt, found in enumerate(shown["prompts"]):
        assert found["prompt"] == PROMPTS[prompt]
        (position,) = found["positions"]
        assert position["position"] == int(lens.position_index[prompt, -1])
        assert position["token"] == lens.input_words[prompt][-1]
        assert [layer["address"] for layer in position["layers"]] == [str(a) for a in lens.addresses]
        for index, layer in enumerate(position["layers"]):
            assert [p["id"] for p in layer["predictions"]] == lens.top_ids[index, prompt, -1].tolist()
            assert [p["token"] for p in layer["predictions"]] == lens.top_words[index][prompt][-1]
            probs = lens.top_probs[index, prompt, -1].tolist()
            assert [p["prob"] for p in layer["predictions"]] == pytest.approx(probs, abs=1e-6)
            assert layer["entropy"] == pytest.approx(float(lens.entropy[index, prompt, -1]), abs=1e-5)


def test_targets(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "lens",
                *PROMPTS,
                "--model",
                folder,
                "--target",
                "Paris",
                "--target",
                "France",
                "--foil",
                "of",
                "--foil",
                "is",
            ]
        )
        == 0
    )
    assert "p(' Paris')" in capsys.readouterr().out
    assert main(["lens", PROMPTS[0], "--model", folder, "--target", "Paris", "--layers", "-1", "--json"]) == 0
    (layer,) = strict(capsys.readouterr().out)["prompts"][0]["positions"][0]["layers"]
    model = MuranoModel(folder)
    ids = model.encode(PROMPTS[0])
    (token,) = [model.encode(PROMPTS[0] + " Paris")[len(ids)]]
    logits = model.hf_model(torch.tensor([ids])).logits[0, -1]
    assert layer["targets"][0]["prob"] == pytest.approx(float(logits.softmax(-1)[token]), abs=1e-6)
    assert layer["targets"][0]["rank"] == int((logits > logits[token]).sum())
    assert main(["lens", *PROMPTS, "--model", folder, "--target", "Paris"]) == 2
    assert "There are 2 prompts and 1 targets: prompt 1 has none" in capsys.readouterr().err


def test_what_is_not_finite_is_null_in_json() -> None:
    import torch

    from murano.cli.lens_text import as_json
    from murano.prompts import as_prompts

    model = MuranoModel(tiny_model("llama"), tokenizer=tiny_tokenizer())
    assert model.check_readout().exact
    lens = logit_lens(model, PROMPTS[0])
    object.__setattr__(lens, "entropy", torch.full_like(lens.entropy, float("nan")))
    object.__setattr__(lens, "top_probs", torch.full_like(lens.top_probs, float("inf")))
    layer = strict(as_json(lens, as_prompts(PROMPTS[0]), True))["prompts"][0]["positions"][0]["layers"][0]
    assert layer["entropy"] is None
    assert {p["prob"] for p in layer["predictions"]} == {None}


def test_plot_and_save(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["lens", PROMPTS[0], "--model", folder, "--plot", "new/lens.svg", "--save", "runs/one"]) == 0
    out, err = capsys.readouterr()
    assert out.count("L0.resid_post") == 1  # the table is what it would be without them
    assert "plot:  new/lens.svg\n" in err
    assert "saved: runs/one\n" in err
    assert "<svg" in (tmp_path / "new/lens.svg").read_text(encoding="utf-8")
    run = load_run("runs/one")
    assert tuple(run["logit_lens"].max_probs.shape) == (3, 1, 5)  # all positions
    assert run["prompts"].texts == PROMPTS[:1]
    assert [Path(plot).name for plot in run["plots"]] == ["lens.svg"]

    assert main(["show", "runs/one", "--verify"]) == 0
    assert "LogitLensResult" in capsys.readouterr().out
    (tmp_path / "runs/one/plots/lens.svg").write_text("something else")
    assert main(["show", "runs/one", "--verify"]) == 1
    assert "plots/lens.svg" in capsys.readouterr().out


@pytest.mark.parametrize(("n", "files"), [(2, ["lens-0.png", "lens-1.png"]), (9, ["lens.png"])])
def test_a_figure_per_prompt_or_one_of_all(folder: str, tmp_path: Path, n: int, files: list[str]) -> None:
    prompts = [f"{PROMPTS[0]} {i}" for i in range(n)]
    assert main(["lens", *prompts, "--model", folder, "--plot", str(tmp_path / "lens.png"), "--quiet"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == files


def test_a_page_of_all_prompts(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "lens.html"
    assert main(["lens", *PROMPTS, "--model", folder, "--plot", str(file), "--quiet"]) == 0
    assert list(tmp_path.iterdir()) == [file]
    text = file.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and text.count('"positions":') == len(PROMPTS)


def test_quiet(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lens", PROMPTS[0], "--model", folder, "--save", str(tmp_path / "run"), "-q"]) == 0
    out, err = capsys.readouterr()
    assert "L1.resid_post" in out
    assert err == ""
    assert (tmp_path / "run/manifest.json").exists()


# Bad input: one line, exit code 2, before any model


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "COMMAND"),
        (["lns"], "'lns'"),
        (["lens"], "no prompts"),
        (["lens", ""], "Prompt 0 is empty"),
        (["lens", "x", "  "], "Prompt 1 holds only whitespace"),
        (["lens", "\udcff"], "not UTF-8"),
        (["lens", "x", "--file", "nowhere.txt"], "nowhere.txt"),
        (["lens", "x", "--layers", "foo"], "'foo'"),
        (["lens", "x", "--backend", "vlm"], "Did you mean 'vllm'"),
        (["lens", "x", "--engine", '{"tensor_parallel_size": 2}'], "add --backend vllm"),
        (["attribute", "x", "--target", "y", "--backend", "vllm"], "a vLLM engine keeps to itself: leave --backend"),
        (["lens", "x", "--backend", "vllm", "--engine", "tensor_parallel_size=2"], "no JSON object"),
        (["lens", "x", "--layers", "L1.mlp_out"], "L1.mlp_out"),
        (["lens", "x", "--positions", "middle"], "'middle'"),
        (["lens", "x", "--top-k", "0"], "--top-k 0"),
        (["lens", "x", "--top-k", "many"], "'many'"),
        (["lens", "x", "--dtype", "float64x"], "'float64x'"),
        (["lens", "x", "--plot", "lens.gif"], "'lens.gif'"),
        (["lens", "x", "--plot", "lens"], ".png"),
        (["lens", "x", "--save", "a/.hidden"], "'.hidden'"),
        (["lens", "x", "--nonsense"], "--nonsense"),
        (["lens", "x", "-q", "-v"], "not allowed"),
        (["show", "nowhere"], "nowhere"),
    ],
)
def test_bad_input(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("murano: error: ")
    assert err.count("\n") == 1
    assert named in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--layers", "99"], "Layer 99"),
        (["--layers", "0-99"], "Layer 3"),
        (["--layers", "0,0"], "twice"),
        (["--layers", "-1,L2"], "twice"),
        (["--top-k", "99999"], "256"),
        (["--positions", "7"], "position 7"),
    ],
)
def test_what_this_model_can_not(
    arguments: list[str], named: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "run"
    assert main(["lens", PROMPTS[0], "--model", folder, "--save", str(save), *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert named in err
    assert not save.exists()


def test_no_such_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lens", "x", "--model", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_places_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for check, name in ((run_folder, "file"), (run_folder, "file/run"), (figure_file, "file/a/lens.png")):
        with pytest.raises(InputError, match="file"):
            check(str(tmp_path / name))
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InputError, match="folder"):
        figure_file(str(tmp_path / "folder.png"))
    with pytest.raises(ArtifactError):
        run_folder("/")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    for check, name in ((run_folder, "a/run"), (figure_file, "a/lens.png")):
        with pytest.raises(InputError, match="permission"):
            check(str(tmp_path / name))


def test_run_folder_keeps_what_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_folder("run") == (Path("."), "run")
    assert run_folder("runs/one/") == (Path("runs"), "one")
    save_run({"score": 1}, tmp_path, "here")
    monkeypatch.chdir(tmp_path / "here")
    assert run_folder(".") == (tmp_path, "here")


@pytest.mark.usefixtures("no_model")
def test_a_folder_of_something_else_is_not_written_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my docs/run").mkdir(parents=True)
    (tmp_path / "my docs/manifest.json").write_text("{}")  # of a browser extension, say
    (tmp_path / "empty").mkdir()
    save_run({"score": 1}, tmp_path, "earlier")
    before = sorted(tmp_path.rglob("*"))
    assert main(["lens", "x", "--save", "my docs"]) == 2
    assert capsys.readouterr().err == (
        "murano: error: --save 'my docs' is a folder of something else, and a run has one of its own. "
        "Write: --save 'my docs/run-2'\n"
    )
    with pytest.raises(InputError, match="Write: --save run$"):
        run_folder(".")
    for name in ("empty", "earlier", "new", "my docs/run"):
        assert run_folder(name)[1] == Path(name).name
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murano.cli.outputs.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"murano-interp\[plot\]"):
        figure_file("lens.png")


# murano doctor


def test_doctor(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", folder]) == 0
    out = capsys.readouterr().out
    for name in ("murano", "python", "torch", "transformers", "nnsight", "cache", "bundled model"):
        assert f"\n{name} " in f"\n{out}"
    assert out.rstrip().endswith(str(MuranoModel(folder).check_readout()).rstrip())


# The process


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["lens", "--help"], ["show", "--help"]])
def test_help_imports_nothing_that_costs_time(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom murano.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'jaxtyping', 'tqdm', 'matplotlib', 'nnterp'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert ("murano " + __version__ if arguments == ["--version"] else "usage: murano") in done.stdout


def test_every_command_has_examples() -> None:
    text = parser().format_help()
    for command in ("lens", "run", "validate", "explain", "show", "doctor"):
        assert command in text
        done = murano(command, "--help")
        assert f"\n  murano {command}" in done.stdout


@pytest.mark.parametrize("command", [["lens", "x"], ["run", "x", "--out", "y"], ["show", "x"], ["doctor"]])
def test_arguments_keep_their_defaults_when_nnsight_has_traced(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = vars(parser().parse_args(command))
    # It gives every object such methods; argparse would take one for a value that is there already.
    for name in ("save", "stop"):
        monkeypatch.setattr(argparse.Namespace, name, lambda self: None, raising=False)
    assert vars(parser().parse_args(command)) == before


def test_bad_input_in_a_process() -> None:
    done = murano("lens", "x", "--layers", "foo")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("murano: error: ")
    assert "Traceback" not in done.stderr


def test_output_that_nobody_reads(folder: str) -> None:
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "murano", "lens", PROMPTS[0], "--model", folder, "-q"],
            stdout=closed,
            stderr=subprocess.PIPE,
            env=environment,
            timeout=300,
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_terminal_that_can_not_show_a_token() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "murano", "lens", "x", "--layers", "é"],
        capture_output=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert rb"'\xe9'" in done.stderr


@pytest.mark.parametrize(("said", "shown"), [((), ""), (("stopped after 3",), "murano: error: stopped after 3\n")])
def test_interrupted(
    said: tuple[str, ...], shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt(*said)

    monkeypatch.setattr(MuranoModel, "__init__", interrupt)
    assert main(["lens", "x"]) == 130
    assert capsys.readouterr().err == shown


@pytest.mark.parametrize(("loudness", "heard"), [([], True), (["--quiet"], False)])
def test_who_is_heard(
    loudness: list[str], heard: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(MuranoModel, "__init__", _complain)
    ours = logging.getLogger("murano")
    before = warnings.showwarning, ours.level, list(ours.handlers)
    assert main(["lens", "x", *loudness]) == 2
    err = capsys.readouterr().err
    assert ("murano: note: from us\n" in err, "murano: logged by us\n" in err) == (heard, heard)
    assert "from them" not in err
    assert (warnings.showwarning, ours.level, list(ours.handlers)) == before


def test_everybody_is_heard_when_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(MuranoModel, "__init__", _complain)
    with pytest.warns(UserWarning, match="from us"), pytest.warns(UserWarning, match="from them"):
        assert main(["lens", "x", "--verbose"]) == 2
    assert "logged by us" in capsys.readouterr().err


def _complain(*args: Any, **kwargs: Any) -> None:
    warnings.warn_explicit("from us", UserWarning, "murano/lens.py", 1, "murano.lens")
    warnings.warn_explicit("from them", UserWarning, "torch/nn.py", 1, "torch.nn")
    logging.getLogger("murano.lens").warning("logged by us")
    raise InputError("enough")
