"""Documents are run into folders: one forward for all points, each point's document alone with the same numbers, resumed after a stop."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.documents import REMOVED, SEED, changed
from support.tiny_tokenizer import tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from murano import Pipeline, documents, keys, lens
from murano.cli import main
from murano.documents import folder as folders
from murano.errors import ArtifactError, InputError, UnsupportedModelError
from murano.model import MuranoModel, batching
from murano.reader import Reader
from murano.steps import LoadPrompts, LogitDiff, LogitLens, Match, TokenProb

KEY, REVISION = SEED["model"]["key"], SEED["model"]["revision"]
ROWS = [
    {"input": "The capital of France is the city of", "base_answer": "Paris", "other": "London"},
    {"input": "The capital of Italy is the city of", "base_answer": "Rome", "other": "Paris"},
    {"input": "The capital of England is the city of", "base_answer": "London", "other": "Rome"},
    {"input": "The capital of France is the king of", "base_answer": "Mary", "other": "John"},
]
FILES = ["document.json", "run.json"] + [
    f"layers={layer}/{name}" for layer in (0, 1) for name in ("document.json", "p_answer.json", "top1.json")
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub cache that holds the document's model under its key and revision: a Llama of two layers, with 32 000 tokens."""
    cache = tmp_path_factory.mktemp("hub")
    repository = cache / f"models--{KEY.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=16,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).float().save_pretrained(repository / "snapshots" / REVISION)
    tokenizer = tiny_tokenizer(sentencepiece=True, bos=True, pad=False)
    tokenizer.save_pretrained(repository / "snapshots" / REVISION)
    return cache


@pytest.fixture(autouse=True)
def in_cache(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with the document and its rows."""
    return write(tmp_path, SEED)


@pytest.fixture(scope="module")
def model(hub: Path) -> Iterator[MuranoModel]:
    """The model, loaded once for all tests that hand it in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
        found = MuranoModel(KEY, revision=REVISION, dtype="fp32")
        found.check_readout()
        yield found


def write(folder: Path, document: Any, rows: Any = ROWS) -> Path:
    (folder / "data" / "weekdays").mkdir(parents=True, exist_ok=True)
    (folder / "data" / "weekdays" / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    (folder / "lens.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def listed(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def values(folder: Path, name: str) -> list[Any]:
    return [row["value"] for row in json.loads((folder / name).read_text(encoding="utf-8"))]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in listed(folder) if not name.endswith("run.json")}


def reads(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The forwards in the log."""
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("Forward of")]


def test_the_seeds_own_check(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The check of seed 002: at the last layer the lens is the model's own output."""
    assert main(["run", str(home / "lens.json"), "--out", str(home / "out"), "-q"]) == 0
    assert sorted(capsys.readouterr().out.split()) == sorted(f"{home / 'out'}/{name}" for name in FILES)
    assert listed(home / "out") == sorted(FILES)
    assert json.loads((home / "out" / "document.json").read_text()) == SEED

    tokenizer = AutoTokenizer.from_pretrained(KEY, revision=REVISION)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    own = AutoModelForCausalLM.from_pretrained(KEY, revision=REVISION, dtype=torch.float32).eval()
    batch = tokenizer([r["input"] for r in ROWS], return_tensors="pt", padding=True)
    with torch.no_grad():
        every = own(**batch).logits
    logits = every[:, -1]
    probs = logits.softmax(dim=-1)
    ids = [tokenizer.encode(r["base_answer"], add_special_tokens=False)[0] for r in ROWS]
    read = json.loads((home / "out" / "layers=1" / "p_answer.json").read_text())
    assert [row["row"] for row in read] == [0, 1, 2, 3]
    assert [row["token_id"] for row in read] == ids
    ulp = float(torch.finfo(torch.float32).eps * logits.abs().max())
    for row, (lens_value, token) in enumerate(
        zip(values(home / "out" / "layers=1", "p_answer.json"), ids, strict=True)
    ):
        mine = float(probs[row, token])
        assert abs(lens_value - mine) <= ulp
        # The same as a log-probability, which is some ten nats: two of its own last places.
        assert abs(math.log(lens_value) - math.log(mine)) <= 2 * 9.6e-7
    top = [float(int(logits[row].argmax()) == token) for row, token in enumerate(ids)]
    assert values(home / "out" / "layers=1", "top1.json") == top

    # As logits, in a product of the model's own shape: equal to the bit, over the whole vocabulary.
    murano = MuranoModel(KEY, revision=REVISION, dtype="fp32")
    stream = murano.capture([r["input"] for r in ROWS], "L1.resid_post")
    assert batch["attention_mask"].all()
    assert torch.equal(murano.decode(next(iter(stream.values()))), every)


def test_rows_of_different_lengths_are_right_too(tmp_path: Path, model: MuranoModel) -> None:
    ragged = [
        {"input": text, "base_answer": "Paris"}
        for text in ("Paris", "The capital of France is", "John gave a book to Mary.")
    ]
    run = documents.load(write(tmp_path, SEED, ragged) / "lens.json").run(model=model)
    for layer in (0, 1):
        for row, r in enumerate(ragged):
            ids = torch.tensor([model.encode(r["input"])])
            with torch.no_grad():
                hidden = model.hf_model.model(ids, output_hidden_states=True).hidden_states
                residual = hidden[1] if layer == 0 else None
                logits = model.hf_model(ids).logits if residual is None else model.decode(residual)
            wanted = logits[0, -1].double().softmax(-1)[model.tokenizer.encode("Paris", add_special_tokens=False)[0]]
            found = run.points[f"layers={layer}"]["p_answer.json"][row]["value"]
            assert found == pytest.approx(float(wanted), rel=5e-6)


def test_one_forward_serves_all_points_and_each_runs_alone_with_the_same_numbers(
    home: Path, model: MuranoModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "murano")
    run = documents.load(home / "lens.json").run(home / "out", model=model)
    assert reads(caplog) == ["Forward of 4 prompts × 9 tokens, read at 2 places"]
    assert run.info["forwards"] == [
        {"step": "lens", "input": "base", "rows": 4, "tokens": 36, "batches": 1, "points": ["layers=0", "layers=1"]}
    ]
    for layer in (0, 1):
        point = home / "out" / f"layers={layer}"
        own = json.loads((point / "document.json").read_text())
        assert own == changed(("sites.resid.layers", [layer]))
        alone = documents.load(point / "document.json")  # its rows are found where the run found them
        again = alone.run(home / f"alone{layer}", model=model)
        assert listed(home / f"alone{layer}") == ["document.json", "p_answer.json", "run.json", "top1.json"]
        for name in ("p_answer.json", "top1.json"):
            assert (home / f"alone{layer}" / name).read_bytes() == (point / name).read_bytes()
            assert again.points[""][name] == run.points[f"layers={layer}"][name]


def test_what_run_json_says(home: Path, model: MuranoModel) -> None:
    info = documents.load(home / "lens.json").run(home / "out", model=model).info
    assert info == json.loads((home / "out" / "run.json").read_text())
    assert info["finished"] is True
    assert info["document"]["name"] == "lens.json"
    assert info["versions"]["torch"] == torch.__version__
    assert info["readout"]["exact"] is True
    assert info["readout"]["path"] == "short"
    assert (info["model"]["model_id"], info["model"]["revision"]) == (KEY, REVISION)
    assert set(info["seconds"]) == {"model", "forwards", "files"}
    assert info["rows"][0]["rows"] == 4
    assert info["notes"] == []
    assert list(info["points"]) == ["layers=0", "layers=1"]
    assert [name for point in info["points"].values() for name in sorted(point["files"])] == FILES[2:]
    assert info["metrics"]["p_answer"]["unit"] == "probability"


# resuming


def test_a_finished_run_is_not_run_again(home: Path, model: MuranoModel, monkeypatch: pytest.MonkeyPatch) -> None:
    document = documents.load(home / "lens.json")
    first = document.run(home / "out", model=model)
    before = {name: (home / "out" / name).stat().st_mtime_ns for name in listed(home / "out")}
    monkeypatch.setattr("murano.model.load_weights", None)  # nothing may load
    assert main(["run", str(home / "lens.json"), "--out", str(home / "out"), "-q"]) == 0
    again = documents.load(home / "lens.json").run(home / "out")
    assert again.points == first.points
    assert again.info == first.info
    assert {name: (home / "out" / name).stat().st_mtime_ns for name in listed(home / "out")} == before


def test_a_run_that_was_stopped_between_two_points_goes_on(
    home: Path, model: MuranoModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    document = documents.load(home / "lens.json")
    document.run(home / "whole", model=model)
    writes = folders.RunFolder.write

    def stop(self: Any, point: Any, *args: Any) -> None:
        if point.name == "layers=1":
            raise KeyboardInterrupt
        writes(self, point, *args)

    with monkeypatch.context() as patch:
        patch.setattr(folders.RunFolder, "write", stop)
        with pytest.raises(KeyboardInterrupt):
            document.run(home / "out", model=model)
    part = documents.open_run(home / "out")
    assert (list(part.points), part.info["finished"]) == (["layers=0"], False)
    assert part.table("p_answer").columns == ("L0.resid_post",)
    before = (home / "out" / "layers=0" / "p_answer.json").stat().st_mtime_ns
    caplog.clear()
    caplog.set_level(logging.INFO, "murano")
    document.run(home / "out", model=model)
    assert reads(caplog) == ["Forward of 4 prompts × 9 tokens, read at 1 places"]
    assert "has 1 of 2 points already" in caplog.text
    assert (home / "out" / "layers=0" / "p_answer.json").stat().st_mtime_ns == before
    assert bytes_of(home / "out") == bytes_of(home / "whole")
    assert not list((home / "out").rglob(".*"))


def test_a_run_that_was_stopped_in_its_forwards_goes_on(
    home: Path, model: MuranoModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lens, "CHECKPOINT_BATCHES", 1)
    make = batching.make_batches
    monkeypatch.setattr(batching, "make_batches", lambda *args, **options: make(*args, **{**options, "max_tokens": 1}))
    rows = [{**row, "input": row["input"] + " the city" * index} for index, row in enumerate(ROWS)]
    write(home, SEED, rows)
    document = documents.load(home / "lens.json")
    document.run(home / "whole", model=model)
    read, count = Reader.read, [0]

    def stop(self: Any, *args: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        read(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "read", stop)
        with pytest.raises(KeyboardInterrupt, match="after 2 of 4 prompts"):
            document.run(home / "out", model=model)
    assert documents.open_run(home / "out").points == {}
    caplog.clear()
    caplog.set_level(logging.INFO, "murano")
    document.run(home / "out", model=model)
    assert len(reads(caplog)) == 2
    assert "The lens goes on from its checkpoint: 2 of 4 prompts are read already." in caplog.text
    assert bytes_of(home / "out") == bytes_of(home / "whole")


def test_a_run_that_was_killed_goes_on(
    home: Path, hub: Path, model: MuranoModel, caplog: pytest.LogCaptureFixture
) -> None:
    code = """
import os, signal, sys
from murano.cli import main
from murano.documents import folder
write = folder.RunFolder._write
def killed(self, name, text):
    if name == "layers=1/top1.json":
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, name, text)
folder.RunFolder._write = killed
main(sys.argv[1:])
"""
    arguments = ["run", str(home / "lens.json"), "--out", str(home / "out"), "-q"]
    environment = {**os.environ, "HF_HUB_CACHE": str(hub), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(documents.open_run(home / "out").points) == ["layers=0"]
    run = documents.load(home / "lens.json").run(home / "out", model=model)
    assert "has 1 of 2 points already" in caplog.text
    documents.load(home / "lens.json").run(home / "whole", model=model)
    assert bytes_of(home / "out") == bytes_of(home / "whole")
    assert run.faults() == {}


def test_a_run_that_was_stopped_before_its_last_word_is_finished(
    home: Path, model: MuranoModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = documents.load(home / "lens.json")

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folders.RunFolder, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            document.run(home / "out", model=model)
    assert documents.open_run(home / "out").info["finished"] is False
    assert document.run(home / "out", model=model).info["finished"] is True


def test_a_run_that_was_refused_leaves_nothing(home: Path, model: MuranoModel, monkeypatch: pytest.MonkeyPatch) -> None:
    document = documents.load(home / "lens.json")
    document.run(home / "whole", model=model)
    before = bytes_of(home / "whole")

    def refuse(self: Any) -> None:
        raise UnsupportedModelError("no")

    monkeypatch.setattr(MuranoModel, "check_readout", refuse)
    with pytest.raises(UnsupportedModelError):
        document.run(home / "out", model=model)
    assert not (home / "out").exists()
    with pytest.raises(UnsupportedModelError):
        document.run(home / "whole", model=model, force=True)
    assert bytes_of(home / "whole") == before


def test_a_damaged_point_is_computed_again(home: Path, model: MuranoModel, caplog: pytest.LogCaptureFixture) -> None:
    document = documents.load(home / "lens.json")
    run = document.run(home / "out", model=model)
    good = bytes_of(home / "out")
    (home / "out" / "layers=1" / "top1.json").write_text("[]")
    (home / "out" / "layers=0" / "top1.json").unlink()
    assert run.faults() == {"layers=0/top1.json": "missing", "layers=1/top1.json": "not as it was written"}
    (home / "out" / "layers=0" / "top1.json").write_bytes(good["layers=0/top1.json"])
    document.run(home / "out", model=model)
    assert "has 1 of 2 points already" in caplog.text
    assert bytes_of(home / "out") == good
    assert documents.open_run(home / "out").faults() == {}


def test_other_rows_are_run_again(home: Path, model: MuranoModel, caplog: pytest.LogCaptureFixture) -> None:
    documents.load(home / "lens.json").run(home / "out", model=model)
    write(home, SEED, ROWS[:2])
    run = documents.load(home / "lens.json").run(home / "out", model=model)
    assert [len(point["top1.json"]) for point in run.points.values()] == [2, 2]
    assert "points already" not in caplog.text
    # A point's document would now be run on other rows than it says: no.
    write(home, SEED, ROWS)
    with pytest.raises(InputError, match=r"steps.lens.rows.base: .*train.json' has changed since .*out' was run"):
        documents.load(home / "out" / "layers=0" / "document.json")


def test_force_starts_over(home: Path, model: MuranoModel, caplog: pytest.LogCaptureFixture) -> None:
    document = documents.load(home / "lens.json")
    document.run(home / "out", model=model)
    (home / "out" / "notes.txt").write_text("mine")
    caplog.set_level(logging.INFO, "murano")
    document.run(home / "out", model=model, force=True)
    assert reads(caplog) == ["Forward of 4 prompts × 9 tokens, read at 2 places"]
    assert listed(home / "out") == sorted([*FILES, "notes.txt"])


def test_a_folder_of_another_document_is_refused(
    home: Path, model: MuranoModel, capsys: pytest.CaptureFixture[str]
) -> None:
    documents.load(home / "lens.json").run(home / "out", model=model)
    (home / "one.json").write_text(json.dumps(changed(("sites.resid.layers", [1]))))
    before = bytes_of(home / "out")
    assert main(["run", str(home / "one.json"), "--out", str(home / "out")]) == 2
    said = capsys.readouterr().err
    assert str(home / "one.json") in said
    assert str(home / "lens.json") in said
    assert "They differ at sites.resid.layers" in said
    assert bytes_of(home / "out") == before
    documents.load(home / "one.json").run(home / "out", model=model, force=True)
    assert listed(home / "out") == ["document.json", "p_answer.json", "run.json", "top1.json"]


def test_a_folder_of_something_else_is_refused(home: Path, model: MuranoModel) -> None:
    document = documents.load(home / "lens.json")
    with pytest.raises(InputError, match=r"holds no run but data, lens.json: name another folder"):
        document.run(home, model=model, force=True)
    with pytest.raises(InputError, match="is a file"):
        document.run(home / "lens.json", model=model)
    with pytest.raises(ArtifactError, match="can't be written"):
        document.run("/proc/nowhere", model=model)


# what is read


def test_components_positions_and_metrics(tmp_path: Path, model: MuranoModel) -> None:
    read = {"site": "resid", "pos": -2, "input": "base", "view": "logits"}
    diff = {"kind": "logit_diff", "of": "in", "target": "base_answer", "foil": "other"}
    saved = ("p_answer", "p_before", "diff", "p_start", "p_end")
    document = changed(
        ("sites.in", {"component": "block_input", "layers": [1]}),
        ("sites.start", {"component": "embeddings"}),
        ("sites.end", {"component": "ln_final"}),
        ("interventions.lens.reads.before", read),
        ("interventions.lens.reads.in", {**read, "site": "in", "pos": -1}),
        ("interventions.lens.reads.start", {**read, "site": "start", "pos": 3}),
        ("interventions.lens.reads.end", {**read, "site": "end", "pos": -1}),
        ("interventions.lens.metrics.p_before", {"kind": "token_prob", "of": "before", "token": "base_answer"}),
        ("interventions.lens.metrics.diff", diff),
        ("interventions.lens.metrics.p_start", {"kind": "token_prob", "of": "start", "token": "other"}),
        ("interventions.lens.metrics.p_end", {"kind": "token_prob", "of": "end", "token": "base_answer"}),
        *((f"steps.lens.saves.{i}", {"value": n, "file_path": f"{n}.json"}) for i, n in enumerate(saved)),
    )  # fmt: skip
    run = documents.load(write(tmp_path, document) / "lens.json").run(model=model)
    ids = torch.tensor([model.encode(r["input"]) for r in ROWS])
    with torch.no_grad():
        hidden = model.hf_model.model(ids, output_hidden_states=True).hidden_states
        own = model.hf_model(ids).logits
    first, embedded = model.decode(hidden[1]), model.decode(hidden[0])
    token = [model.tokenizer.encode(r["base_answer"], add_special_tokens=False)[0] for r in ROWS]
    other = [model.tokenizer.encode(r["other"], add_special_tokens=False)[0] for r in ROWS]
    each = range(len(ROWS))

    def probs(logits: Any, position: int, tokens: list[int]) -> list[float]:
        return logits[:, position].softmax(-1)[each, tokens].tolist()

    def got(point: str, name: str) -> Any:
        return pytest.approx([row["value"] for row in run.points[point][f"{name}.json"]], rel=5e-6)

    assert probs(first, -1, token) == got("layers=0", "p_answer")
    assert probs(first, -2, token) == got("layers=0", "p_before")
    assert probs(own, -2, token) == got("layers=1", "p_before")
    for point in ("layers=0", "layers=1"):
        assert probs(embedded, 3, other) == got(point, "p_start")
        assert probs(own, -1, token) == got(point, "p_end")
        wanted = first[:, -1].log_softmax(-1)
        assert (wanted[each, token] - wanted[each, other]).tolist() == pytest.approx(
            [row["value"] for row in run.points[point]["diff.json"]], abs=3e-6
        )
    assert run.points["layers=0"]["diff.json"][0]["foil"] == " London"
    assert run.info["points"]["layers=1"]["addresses"]["p_start"] == "embeddings"
    # A metric of a site that is not swept is the same at every point, and its table says points instead of layers.
    assert run.table("p_start").columns == ("layers=0", "layers=1")


def test_a_document_is_the_steps_that_one_would_write(tmp_path: Path, model: MuranoModel) -> None:
    diff = {"kind": "logit_diff", "of": "lens", "target": "base_answer", "foil": "other"}
    document = documents.load(
        write(
            tmp_path,
            changed(
                ("interventions.lens.metrics.diff", diff),
                ("steps.lens.saves.2", {"value": "diff", "file_path": "diff.json"}),
            ),
        )
        / "lens.json"
    )
    (pipeline,) = document.pipelines(model)
    assert [type(step) for step in pipeline] == [LoadPrompts, LogitLens, TokenProb, Match, LogitDiff]
    results = pipeline.run()
    by_hand = Pipeline(
        [
            LoadPrompts(
                [r["input"] for r in ROWS], targets=[r["base_answer"] for r in ROWS], foils=[r["other"] for r in ROWS]
            ),
            LogitLens(model, layers=[0, 1], positions=[-1], apart=True),
            TokenProb(),
            Match(),
            LogitDiff(),
        ]
    ).run()
    run = document.run(model=model)
    for key, name in ((keys.TOKEN_PROB, "p_answer"), (keys.MATCH, "top1"), (keys.LOGIT_DIFF, "diff")):
        assert torch.equal(results[key].values, by_hand[key].values)
        assert torch.equal(run.table(name).values, by_hand[key].values)


def test_two_steps_and_two_inputs(tmp_path: Path, model: MuranoModel) -> None:
    spec = SEED["interventions"]["lens"]
    document = changed(
        ("roles.second", {"field": "input"}),
        ("interventions.lens.reads.too", {**spec["reads"]["lens"], "input": "second"}),
        ("interventions.lens.metrics.p_too", {"kind": "token_prob", "of": "too", "token": "base_answer"}),
        ("steps.lens.rows.second", ROWS[:1]),
        ("steps.lens.saves.2", {"value": "p_too", "file_path": "too/p.json"}),
        ("steps.more", {**SEED["steps"]["lens"], "saves": [{"value": "top1", "file_path": "again.json"}]}),
    )
    document["steps"]["more"]["rows"]["second"] = ROWS[:1]
    run = documents.load(write(tmp_path, document) / "lens.json").run(tmp_path / "out", model=model)
    assert [(f["step"], f["input"], f["rows"]) for f in run.info["forwards"]] == [
        ("lens", "base", 4), ("lens", "second", 1), ("more", "base", 4)
    ]  # fmt: skip
    point = run.points["layers=1"]
    assert set(point) == {"p_answer.json", "top1.json", "too/p.json", "again.json"}
    assert point["again.json"] == point["top1.json"]
    assert point["too/p.json"][0]["value"] == pytest.approx(point["p_answer.json"][0]["value"], rel=5e-6)
    assert run.table("too/p").values.shape == (1, 2)


@pytest.mark.filterwarnings("ignore:.*several tokens")
def test_answers_as_written_and_continued(tmp_path: Path) -> None:
    from support.tiny_models import tiny_model

    tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")  # byte-level: " Paris" and "Paris" are different tokens
    base = changed(("model", {"key": str(tmp_path / "model")}))
    written = documents.load(write(tmp_path, base) / "lens.json")
    with pytest.warns(
        UserWarning,
        match=r"4 of the answers .* follow their prompt: 'Paris' is read by 'P.*\"continued\" in roles.base",
    ):
        run = written.run()
    assert run.points["layers=0"]["p_answer.json"][0]["token_id"] == written.model.tokenizer.encode("Paris")[0]
    assert any("several tokens, and read by the first one" in note for note in run.info["notes"])
    assert "note: 4 of the answers in 'base_answer'" in written.plan()
    (tmp_path / "lens.json").write_text(json.dumps(changed(("roles.base.answers", "continued"), base=base)))
    continued = documents.load(tmp_path / "lens.json")
    run = continued.run()
    assert run.info["notes"] == []
    assert [row["token"] for row in run.points["layers=0"]["p_answer.json"]] == [" Paris", " Rome", " London", " Mary"]
    # Written with its space, an answer is read the same either way.
    spaced = [{**row, "base_answer": " " + row["base_answer"]} for row in ROWS]
    again = documents.load(write(tmp_path, base, spaced) / "lens.json").run()
    assert again.points == run.points


def test_several_accepted_answers_and_token_ids(tmp_path: Path, model: MuranoModel) -> None:
    ids = [model.tokenizer.encode(r["base_answer"], add_special_tokens=False)[0] for r in ROWS]
    single = documents.load(write(tmp_path, SEED) / "lens.json").run(model=model)
    rows = [{**row, "base_answer": token} for row, token in zip(ROWS, ids, strict=True)]
    by_id = documents.load(write(tmp_path, SEED, rows) / "lens.json").run(model=model)
    assert by_id.points == single.points
    rows = [{**row, "base_answer": [row["base_answer"], row["other"]]} for row in ROWS]
    both = documents.load(write(tmp_path, SEED, rows) / "lens.json").run(model=model)
    row = both.points["layers=1"]["p_answer.json"][0]
    assert row["token"] == [" Paris", " London"]
    assert row["value"] > single.points["layers=1"]["p_answer.json"][0]["value"]


# explaining


def test_the_plan(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("murano.model.load_weights", None)  # nothing may load
    assert main(["explain", str(home / "lens.json")]) == 0
    assert capsys.readouterr().out == (
        f"""lens.json
  model: {KEY} at {REVISION}, fp32
  points: 2; they share model, rows and inputs, so 1 forward over the rows instead of 2
  lens: observe
    forward on 'base': 4 rows × 9 tokens of weekdays/train, 36 tokens in all, for 2 points
      layers=0
        read 'lens' at block_output[0] (L0.resid_post), pos -1, as logits
          p_answer: token_prob, token 'base_answer' → p_answer.json
          top1: match, expected 'base_answer' → top1.json
      layers=1
        read 'lens' at block_output[1] (L1.resid_post), pos -1, as logits
          p_answer: token_prob, token 'base_answer' → p_answer.json
          top1: match, expected 'base_answer' → top1.json
"""
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            [("sites.resid.layers.sweep", [[0], [2]])],
            r"sites.resid.layers.sweep\[1\]\[0\]: the model has 2 layers. Found: 2",
        ),
        ([("sites.resid.layers.sweep", [[1], [-1]])], r"sites.resid.layers.sweep\[1\]\[0\]: this is layer 1 once more"),
        ([("sites.resid.layers", [-3])], r"sites.resid.layers\[0\]: the model has 2 layers"),
        (
            [("interventions.lens.reads.lens.pos", 9)],
            r"steps.lens.rows.base\[0\]: row 0 of weekdays/train has 9 tokens, so read 'lens' finds no position 9. Found: 'The cap",
        ),
    ],
)
def test_what_only_the_model_can_tell_is_said_before_its_weights_load(
    tmp_path: Path, changes: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("murano.model.load_weights", None)
    document = documents.load(write(tmp_path, changed(*changes)) / "lens.json")
    for attempt in (document.plan, document.run, lambda: document.run(tmp_path / "out")):
        with pytest.raises(InputError, match=words):
            attempt()
    assert not (tmp_path / "out").exists()


def test_rows_that_the_model_cant_read_are_all_said_before_its_weights_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("murano.model.load_weights", None)
    diff = {"kind": "logit_diff", "of": "lens", "target": "base_answer", "foil": "other"}
    text = ROWS[0]["input"]
    rows = [
        ROWS[0],
        {"input": text, "base_answer": "Paris", "other": "Paris"},
        {"input": text, "base_answer": ["Rome", "Paris"], "other": ["London", "Paris"]},
        {"input": text, "base_answer": 32_000, "other": "Rome"},
        {"input": "Paris " * 2050, "base_answer": "Paris", "other": "Rome"},
    ]
    base = changed(("interventions.lens.metrics.diff", diff))
    base["steps"]["lens"]["saves"].append({"value": "diff", "file_path": "diff.json"})
    document = documents.load(write(tmp_path, base, rows) / "lens.json")
    for attempt in (document.plan, document.run, lambda: document.run(tmp_path / "out")):
        with pytest.raises(documents.DocumentError) as caught:
            attempt()
        assert [str(problem).partition(". Found")[0] for problem in caught.value.problems] == [
            "steps.lens.rows.base[1]: row 1 of weekdays/train can't be scored: foil ' Paris' is the target itself (' Paris'): the "
            "difference would be 0 everywhere",
            "steps.lens.rows.base[2]: row 2 of weekdays/train can't be scored: foil ' Paris' is the target itself (' Paris'): the "
            "difference would be 0 everywhere",
            "steps.lens.rows.base[3]: row 3 of weekdays/train can't be scored: target 32000: token id 32000 is outside the "
            "vocabulary, 0 to 31999",
            f"steps.lens.rows.base[4]: row 4 of weekdays/train has {len(document.model.encode(rows[4]['input']))} tokens, but the "  # type: ignore[arg-type]
            "model's context is 2048",
        ]
    assert not (tmp_path / "out").exists()
    # Of many, the first ones and how many there are; on the command line a line each.
    write(tmp_path, base, [ROWS[0], *rows[1:2] * 7])
    for command in (["explain", str(tmp_path / "lens.json")], ["run", str(tmp_path / "lens.json"), "--out", "out"]):
        assert main(command) == 2
        said = capsys.readouterr().err.splitlines()
        assert said[0] == "murano: error: lens.json: 6 problems"
        assert said[1] == "  steps.lens.rows.base: 7 of 8 rows can't be read; here are the first 5."
        assert [line.partition(":")[0] for line in said[2:]] == [f"  steps.lens.rows.base[{i}]" for i in range(1, 6)]


def tiny_folder(path: Path) -> Path:
    from support.tiny_models import tiny_model

    tiny_model("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.mark.filterwarnings("ignore:.*several tokens", "ignore:.*follow their prompt")
def test_a_relative_model_folder_is_found_beside_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    tiny = tiny_folder(home / "tiny")
    base = changed(("model", {"key": "tiny", "dtype": "fp32"}))
    write(home, base)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    document = documents.load(home / "lens.json")
    assert f"  model: tiny ({tiny}), fp32" in document.plan()
    run = document.run(home / "out")
    assert json.loads((home / "out" / "document.json").read_text()) == base
    # The documents of the run and of its points find it, too.
    alone = documents.load(home / "out" / "layers=1" / "document.json").run()
    assert alone.points[""] == run.points["layers=1"]
    again = documents.load(home / "out" / "document.json").run(home / "again")
    assert again.points == run.points
    assert document.run(model=MuranoModel(tiny, dtype="fp32")).points == run.points
    # After the document's folder comes the current one.
    (home / "lens.json").rename(tmp_path / "elsewhere" / "lens.json")
    tiny.rename(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    moved = documents.load("elsewhere/lens.json")
    assert moved.open_model().source == str(tmp_path / "tiny")
    # Another one of that name is not taken for it.
    tiny_folder(tmp_path / "elsewhere" / "tiny")
    with pytest.raises(InputError, match="names the model 'tiny' in fp32, and MuranoModel"):
        write(tmp_path / "elsewhere", base)
        moved.run(model=MuranoModel("tiny", dtype="fp32"))


def test_what_is_no_folder_and_no_model(home: Path) -> None:
    document = documents.load(home / "lens.json")
    for out in (5, ""):
        with pytest.raises(InputError, match=f"out={out!r} is no path: give the folder to write"):
            document.run(out)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"model= is a MuranoModel, not a str, 'gpt2': leave it out"):
        document.run(model="gpt2")  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match=r"There is no folder '.*nope'"):
        documents.open_run(home / "nope")
    with pytest.raises(ArtifactError, match=r"'.*lens.json' is a file: give the folder of a run"):
        documents.open_run(home / "lens.json")
    with pytest.raises(InputError, match="path=5 is no path: give the folder of a run"):
        documents.open_run(5)  # type: ignore[arg-type]


def test_all_layers_and_the_last_one(tmp_path: Path, model: MuranoModel) -> None:
    everything = documents.load(write(tmp_path, changed(("sites.resid.layers.sweep", "all"))) / "lens.json").run(
        model=model
    )
    listed_out = documents.load(write(tmp_path, SEED) / "lens.json").run(model=model)
    assert everything.points == listed_out.points
    last = documents.load(write(tmp_path, changed(("sites.resid.layers.sweep", [[-1]]))) / "lens.json").run(model=model)
    assert last.points["layers=-1"] == listed_out.points["layers=1"]
    assert last.info["points"]["layers=-1"]["addresses"]["p_answer"] == "L1.resid_post"


def test_another_model_is_not_taken(home: Path, model: MuranoModel) -> None:
    other = documents.load(write(home, changed(("model.revision", "main"))) / "lens.json")
    with pytest.raises(InputError, match=f"names the model '{KEY}' at main in fp32, and MuranoModel"):
        other.run(model=model)
    assert documents.load(changed(("model", {"key": "bundled"}), ("steps.lens.rows.base", ROWS))).model_key is None


# the curves


def test_murano_show(home: Path, model: MuranoModel, capsys: pytest.CaptureFixture[str]) -> None:
    run = documents.load(home / "lens.json").run(home / "out", model=model)
    assert main(["show", str(home / "out"), "--metric", "p_answer", "--plot", str(home / "curve.png"), "--verify"]) == 0
    printed = capsys.readouterr()
    mean = run.table("p_answer").values.mean(0).tolist()
    assert f"  layers=0  {mean[0]:>10.4g}  [" in printed.out
    assert f"  layers=1  {mean[1]:>10.4g}  [" in printed.out
    assert "top1" not in printed.out
    assert "equal to the bit in its proof" in printed.out
    assert printed.out.endswith("all files are as they were written.\n")
    assert (home / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert main(["show", str(home / "out"), "--plot", str(home / "c.svg")]) == 0
    assert sorted(p.name for p in home.glob("c-*.svg")) == ["c-p_answer.svg", "c-top1.svg"]
    assert main(["show", str(home / "out"), "--metric", "p_anser"]) == 2
    assert "Did you mean 'p_answer'?" in capsys.readouterr().err
    (home / "out" / "layers=0" / "top1.json").write_text("[]")
    assert main(["show", str(home / "out"), "--metric", "p_answer", "--verify"]) == 1
    assert "layers=0/top1.json: not as it was written" in capsys.readouterr().out


def test_show_says_what_is_damaged(home: Path, model: MuranoModel, capsys: pytest.CaptureFixture[str]) -> None:
    run = documents.load(home / "lens.json").run(home / "out", model=model)
    out = str(home / "out")
    (home / "out" / "layers=0" / "top1.json").unlink()
    (home / "out" / "layers=1" / "top1.json").write_text("[]")
    (home / "out" / "layers=1" / "document.json").unlink()
    assert main(["show", out, "--verify"]) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[-3:] == [
        "layers=0/top1.json: missing",
        "layers=1/top1.json: not as it was written",
        "layers=1/document.json: missing",
    ]
    assert "p_answer (probability): mean of 4 rows" in printed  # whole, and shown
    assert "top1 (" not in printed
    assert main(["show", out, "--metric", "p_answer"]) == 0
    capsys.readouterr()
    assert main(["show", out, "--metric", "top1"]) == 2
    said = capsys.readouterr().err
    assert (
        f"{home / 'out' / 'layers=0' / 'top1.json'}' is missing: murano show {out} --verify lists all such files"
        in said
    )
    opened = documents.open_run(home / "out")
    assert opened.points["layers=1"]["p_answer.json"] == run.points["layers=1"]["p_answer.json"]
    with pytest.raises(ArtifactError, match=r"layers=1/top1.json' is not as it was written"):
        opened.points["layers=1"]["top1.json"]
    (home / "out" / "document.json").write_text("{}")
    assert main(["show", out, "--verify"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "document.json: not as it was written"
    (home / "out" / "document.json").unlink()
    assert main(["show", out, "--verify"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "document.json: missing"


def test_a_metric_goes_by_its_name_or_its_files(tmp_path: Path, model: MuranoModel) -> None:
    document = changed(
        (
            "steps.lens.saves",
            [{"value": "p_answer", "file_path": "a/first.json"}, {"value": "top1", "file_path": "second.json"}],
        ),
        ("steps.more", {**SEED["steps"]["lens"], "saves": [{"value": "top1", "file_path": "third.json"}]}),
    )
    run = documents.load(write(tmp_path, document) / "lens.json").run(tmp_path / "out", model=model)
    assert torch.equal(run.table("p_answer").values, run.table("a/first").values)
    assert main(["show", str(tmp_path / "out"), "--metric", "p_answer", "-q"]) == 0
    with pytest.raises(InputError, match="'top1' is a metric of several steps: name .* saved in, second or third"):
        run.table("top1")
    with pytest.raises(
        InputError, match="no metric 'p_anser'. Did you mean 'p_answer'. It has: a/first, second, third"
    ):
        run.table("p_anser")


def test_show_refuses_before_the_work(
    home: Path, model: MuranoModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> str:
        assert main(["show", *arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        return printed.err.removeprefix("murano: error: ").strip()

    documents.load(home / "lens.json").run(home / "out", model=model)
    out = str(home / "out")
    assert said(out, "--plot", "x.html") == "--plot 'x.html': a curve is one of .png, .pdf, .svg."
    assert said(f"{out}/layers=1") == f"'{out}/layers=1' is a point of a run: open the whole run, {out!r}."
    assert said(f"{home}/ot", "--metric", "top1") == f"There is no folder '{home}/ot'. Did you mean {out!r}?"

    def stop(self: Any, *args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folders.RunFolder, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        documents.load(home / "lens.json").run(home / "none", model=model)
    assert said(str(home / "none"), "--plot", str(home / "f.png")) == (
        f"--plot '{home}/f.png': no point of this run is finished, so there is no curve to draw."
    )


def test_a_run_of_one_point_and_one_row(tmp_path: Path, model: MuranoModel, capsys: pytest.CaptureFixture[str]) -> None:
    from murano.plotting.metrics import metric_curves

    write(tmp_path, changed(("sites.resid.layers", [1])))
    run = documents.load(tmp_path / "lens.json").run(tmp_path / "out", model=model)
    summary = run.table("p_answer").mean()
    assert main(["show", str(tmp_path / "out"), "--metric", "p_answer"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "1 point, finished" in printed[0]
    assert printed[-1].startswith(f"  L1.resid_post  {float(summary.mean):>10.4g}  [{float(summary.low):.4g}, ")
    ax = metric_curves(run.table("p_answer")).draw(bare=True)
    assert ax.get_title() == "mean of 4 prompts, 95% interval"
    (bar,) = ax.collections
    assert bar.get_segments()[0][:, 1].tolist() == [float(summary.low), float(summary.high)]
    # One row has a value, and no interval.
    write(tmp_path, changed(("sites.resid.layers", [1])), ROWS[:1])
    run = documents.load(tmp_path / "lens.json").run(tmp_path / "one", model=model)
    assert main(["show", str(tmp_path / "one"), "--metric", "p_answer"]) == 0
    printed = capsys.readouterr().out.splitlines()
    value = run.points[""]["p_answer.json"][0]["value"]
    assert printed[-2] == "p_answer (probability): value of the only row"
    assert printed[-1] == f"  L1.resid_post  {value:>10.4g}  {'█' * 40}"
    ax = metric_curves(run.table("p_answer")).draw(bare=True)
    assert (ax.get_title(), len(ax.collections)) == ("", 0)


def test_what_is_plotted(home: Path, model: MuranoModel) -> None:
    from murano import plotting

    table = documents.load(home / "lens.json").run(model=model).table("p_answer")
    ax = plotting.plot_metric(table)
    (line,) = ax.get_lines()
    assert line.get_ydata().tolist() == pytest.approx(table.values.mean(0).tolist())
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "p_answer (probability)")
    assert [t.get_text() for t in ax.get_xticklabels()] == ["0", "1"]


def test_a_run_that_cant_be_opened(home: Path, model: MuranoModel) -> None:
    with pytest.raises(ArtifactError, match="is no run of a document"):
        documents.open_run(home)
    run = documents.load(home / "lens.json").run(home / "out", model=model)
    with pytest.raises(InputError, match="no metric 'p_anser'.*Did you mean 'p_answer'"):
        run.table("p_anser")
    (home / "out" / "run.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"Can't read .*run.json"):
        documents.open_run(home / "out")
    (home / "out" / "run.json").write_text("{}")
    with pytest.raises(ArtifactError, match="was edited or is damaged"):
        documents.open_run(home / "out")


@pytest.mark.parametrize("family", ["llama", "gemma2", "big_bird"])
def test_layers_apart_do_not_depend_on_which_others_are_read(family: str) -> None:
    from support.tiny_models import tiny_model

    model = MuranoModel(tiny_model(family), tokenizer=tiny_tokenizer())
    prompts = ["The capital of France is", "Paris is in", "John gave a book to"]
    whole = lens.logit_lens(model, prompts, apart=True, product="torch")
    for layer in range(model.n_layers):
        alone = lens.logit_lens(model, prompts, layers=layer, apart=True, product="torch")
        for name in ("top_probs", "top_ids", "entropy", "log_normalizer"):
            one, of_all = getattr(alone, name)[0], getattr(whole, name)[layer]
            assert torch.equal(one[alone.attention_mask], of_all[whole.attention_mask])
    with pytest.raises(InputError, match="apart=True reads each layer alone, and 'kl'"):
        lens.logit_lens(model, prompts, apart=True, stats="kl")


def test_removed_is_removed() -> None:
    assert "header" not in changed(("header", REMOVED))
