"""Documents that can't be run: everything that is wrong is said at once, each with its path, before a model is looked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.documents import REMOVED, SEED, changed

from murano import documents
from murano.cli import main
from murano.documents import DocumentError, Problem
from murano.documents.plan import Plan
from murano.errors import ArtifactError, InputError

READ = "interventions.lens.reads.lens"
P, TOP1 = "interventions.lens.metrics.p_answer", "interventions.lens.metrics.top1"
SAVE = "steps.lens.saves.0"
DIFF = {"kind": "logit_diff", "of": "lens", "target": "base_answer", "foil": "input"}
WRITE = {"site": "resid", "pos": -1, "operand": "lens"}

#: What is changed in the document of seed 002, the path of the one problem it makes, and words that the message has.
BROKEN: list[tuple[list[tuple[str, Any]], str, str]] = [
    # fields that are not there, not known, or of another type
    ([("headr", {})], "headr", "Did you mean 'header'?"),
    ([("header", "a lens")], "header", "must be an object"),
    ([("header.descriptoin", "x")], "header.descriptoin", "Did you mean 'description'?"),
    ([("header.description", 3)], "header.description", "must be a text"),
    ([("header.schema_version", 2)], "header.schema_version", "newer Murano"),
    ([("header.schema_version", 0)], "header.schema_version", "too small"),
    ([("header.schema_version", "1")], "header.schema_version", "whole number"),
    ([("model", REMOVED)], "model", "missing"),
    ([("model.key", REMOVED)], "model.key", "a hub id, a model's folder"),
    ([("model.key", " ")], "model.key", "empty"),
    ([("model.key", 7)], "model.key", "must be a text"),
    ([("model.revison", "main")], "model.revison", "Did you mean 'revision'?"),
    ([("model.revision", 9)], "model.revision", "must be a text"),
    ([("model.key", None)], "model.revision", "bundled model has no revisions"),
    ([("model.dtype", "fp31")], "model.dtype", "Did you mean 'fp32'?"),
    ([("roles", REMOVED)], "roles", "missing"),
    ([("roles.base", "input")], "roles.base", "must be an object"),
    ([("roles.base.field", REMOVED)], "roles.base.field", "missing"),
    ([("roles.base.filed", "input")], "roles.base.filed", "Did you mean 'field'?"),
    ([("roles.base.answers", "continue")], "roles.base.answers", "Did you mean 'continued'?"),
    ([("sites.resid.component", "block_outptu")], "sites.resid.component", "Did you mean 'block_output'?"),
    ([("sites.resid.component", REMOVED)], "sites.resid.component", "missing"),
    ([("sites.resid.layer", [1])], "sites.resid.layer", "Did you mean 'layers'?"),
    ([("sites.resid.layers", 3)], "sites.resid.layers", "must be a list"),
    ([("sites.resid.layers", [0.5])], "sites.resid.layers[0]", "whole number"),
    ([("sites.resid.layers", {"sweeps": [[0]], "sweep": [[0]]})], "sites.resid.layers.sweeps", "Did you mean 'sweep'?"),
    ([("sites.resid.layers.sweep", "al")], "sites.resid.layers.sweep", "Did you mean 'all'?"),
    ([("sites.resid.layers.sweep.1", 1)], "sites.resid.layers.sweep[1]", "must be a list"),
    ([("sites.resid.layers.sweep.1", ["1"])], "sites.resid.layers.sweep[1][0]", "whole number"),
    ([("interventions", REMOVED)], "interventions", "missing"),
    ([("interventions.lens.raeds", {})], "interventions.lens.raeds", "Did you mean 'reads'?"),
    ([(f"{READ}.view", "logit")], f"{READ}.view", "Did you mean 'logits'?"),
    ([(f"{READ}.pos", "-1")], f"{READ}.pos", "whole number"),
    ([(f"{READ}.pos", True)], f"{READ}.pos", "whole number"),
    ([(f"{READ}.pos", REMOVED)], f"{READ}.pos", "missing"),
    ([(f"{READ}.input", REMOVED)], f"{READ}.input", "missing"),
    ([(f"{READ}.sight", "resid")], f"{READ}.sight", "Did you mean 'site'?"),
    ([(f"{P}.kind", "tokenprob")], f"{P}.kind", "Did you mean 'token_prob'?"),
    ([(f"{P}.kind", REMOVED)], f"{P}.kind", "a metric needs its kind"),
    ([(f"{P}.token", REMOVED)], f"{P}.token", "missing"),
    ([(f"{TOP1}.expected", ["a"])], f"{TOP1}.expected", "must be a text"),
    ([(f"{TOP1}.token", "a")], f"{TOP1}.token", "there is no field 'token' here"),
    ([(P, {**DIFF, "foil": None})], f"{P}.foil", "must be a text"),
    ([(P, 0.5)], P, "must be an object"),
    ([("steps", REMOVED)], "steps", "missing"),
    ([("steps", {})], "steps", "at least one"),
    ([("steps.lens.kind", "obsrve")], "steps.lens.kind", "Did you mean 'observe'?"),
    ([("steps.lens.rows", REMOVED)], "steps.lens.rows", "missing"),
    ([("steps.lens.rows.base", 4)], "steps.lens.rows.base", "name of a data set"),
    ([("steps.lens.saves", [])], "steps.lens.saves", "at least one"),
    ([(f"{SAVE}.filepath", "a.json")], "steps.lens.saves[0].filepath", "Did you mean 'file_path'?"),
    ([(f"{SAVE}.value", REMOVED)], "steps.lens.saves[0].value", "missing"),
    # the refusals of seed 002
    ([("sites.resid.component", "mlp_output")], f"{READ}.view", "'mlp_output' is not the residual stream"),
    ([("sites.resid.component", "attention_output")], f"{READ}.view", "projects the residual stream through the head"),
    ([(f"{READ}.featurizer", "sae")], f"{READ}.featurizer", "a featurized read cannot also be viewed as logits"),
    ([("interventions.lens.writes", {"w": WRITE})], "interventions.lens.writes.w.operand", "takes the read 'lens', which is vocab"),
    ([(f"{P}.of", "lnes")], f"{P}.of", "Did you mean 'lens'?"),
    ([("sites.resid.layers.sweep", [])], "sites.resid.layers.sweep", "a sweep with no points"),
    ([("steps.lens.rows.base", "weekdays/trian")], "steps.lens.rows.base", "Did you mean 'weekdays/train'?"),
    # names that name nothing
    ([(f"{READ}.site", "resdi")], f"{READ}.site", "Did you mean 'resid'?"),
    ([(f"{READ}.input", "bsae")], f"{READ}.input", "Did you mean 'base'?"),
    ([("steps.lens.interventions", "lnes")], "steps.lens.interventions", "Did you mean 'lens'?"),
    ([("steps.lens.rows.bsae", "facts")], "steps.lens.rows.bsae", "Did you mean 'base'?"),
    ([(f"{SAVE}.value", "p_anser")], "steps.lens.saves[0].value", "Did you mean 'p_answer'?"),
    ([("roles.other", {"field": "input"}), (f"{READ}.input", "other")], "steps.lens.rows", "needs rows for 'other'"),
    # sites
    ([("sites.resid.layers", REMOVED)], "sites.resid.layers", "lies in every block"),
    ([("sites.resid.component", "ln_final")], "sites.resid.layers", "takes no layers"),
    ([("sites.resid.layers", [0, 1])], "sites.resid.layers", '{"sweep": [[0], [1]]}'),
    ([("sites.resid.layers", [])], "sites.resid.layers", "a point reads one layer"),
    ([("sites.resid.layers.sweep.1", [0, 1])], "sites.resid.layers.sweep[1]", "a point reads one layer"),
    ([("sites.resid.layers.sweep.1", [0])], "sites.resid.layers.sweep[1]", "there already, as [0]"),
    ([("sites.too", {"component": "block_input", "layers": {"sweep": [[0]]}})], "sites.too.layers", "sites.resid has one"),
    # reads, metrics, writes
    ([(f"{READ}.view", None), (TOP1, REMOVED), ("steps.lens.saves.1", REMOVED)], f"{P}.of", "has no view"),
    ([("interventions.lens.writes", {"w": {**WRITE, "operand": "x"}})], "interventions.lens.writes.w", "Murano observes"),
    ([(f"{READ}2", {**SEED["interventions"]["lens"]["reads"]["lens"], "view": None, "featurizer": "sae"})],
     f"{READ}2.featurizer", "no featurizers"),
    ([("interventions.lens.metrics.d", {**DIFF, "foil": "base_answer"})], "interventions.lens.metrics.d.foil", "its own foil"),
    ([("interventions.lens.metrics.d", {**DIFF, "target": "input", "foil": "base_answer"})],
     "interventions.lens.metrics.top1", "one target and one foil"),
    # saves
    ([(f"{SAVE}.file_path", "../p.json")], "steps.lens.saves[0].file_path", "no file in the point's folder"),
    ([(f"{SAVE}.file_path", "/tmp/p.json")], "steps.lens.saves[0].file_path", "no file in the point's folder"),
    ([(f"{SAVE}.file_path", "p_answer.csv")], "steps.lens.saves[0].file_path", "results are JSON"),
    ([(f"{SAVE}.file_path", "run.json")], "steps.lens.saves[0].file_path", "the run writes 'run.json' itself"),
    ([(f"{SAVE}.file_path", "RUN.json")], "steps.lens.saves[0].file_path", "the run writes 'run.json' itself. Found: 'RUN.json'"),
    ([(f"{SAVE}.file_path", "document.json/p.json")], "steps.lens.saves[0].file_path", "the run writes 'document.json' itself"),
    ([(f"{SAVE}.file_path", "./p.json")], "steps.lens.saves[0].file_path", "Found: './p.json'. Allowed: 'p.json'"),
    ([(f"{SAVE}.file_path", "a//p.json")], "steps.lens.saves[0].file_path", "Found: 'a//p.json'. Allowed: 'a/p.json'"),
    ([(f"{SAVE}.file_path", "a/./p.json")], "steps.lens.saves[0].file_path", "parts that say nothing. Found: 'a/./p.json'"),
    ([(f"{SAVE}.file_path", "TOP1.json")], "steps.lens.saves[1].file_path", "differs from the file 'TOP1.json' of another save only in"),
    ([(f"{SAVE}.file_path", "top1.json/x.json")], "steps.lens.saves[1].file_path", "another save has 'top1.json/x.json'"),
    ([("steps.lens.saves.1.file_path", "p_answer.json/x.json")], "steps.lens.saves[1].file_path",
     "a file can't lie inside another one, and another save has 'p_answer.json'"),
    ([(f"{SAVE}.file_path", "top1.json")], "steps.lens.saves[1].file_path", "another save has this file"),
    # rows
    ([("steps.lens.rows.base", "../weekdays")], "steps.lens.rows.base", "inside the document's folder"),
    ([("steps.lens.rows.base", [])], "steps.lens.rows.base", "has no rows"),
    ([("roles.base.field", "inptu")], "steps.lens.rows.base[0]", "roles.base.field names. Found: 'input', 'base_answer'. Did"),
    ([(f"{P}.token", "answer"), (f"{TOP1}.expected", "answer")],
     "steps.lens.rows.base[0]", "row 0 of weekdays/train has no field 'answer'"),
    ([("steps.lens.rows.base", [{"input": "a", "base_answer": "b"}, {"input": "c"}])],
     "steps.lens.rows.base[1]", "row 1 of the document's own rows has no field 'base_answer'"),
    ([("steps.lens.rows.base", [{"input": "a", "base_answer": "b"}, {"input": "", "base_answer": "b"}])],
     "steps.lens.rows.base[1].input", "the prompt of row 1 is empty"),
    ([("steps.lens.rows.base", [{"input": "a", "base_answer": ""}])],
     "steps.lens.rows.base[0].base_answer", "must be a string that continues"),
    ([("steps.lens.rows.base", [{"input": "a", "base_answer": []}])], "steps.lens.rows.base[0].base_answer", "row 0 has no answer"),
    ([("steps.lens.rows.base", [{"input": 1.5, "base_answer": "b"}])], "steps.lens.rows.base[0].input", "a string, a chat"),
]  # fmt: skip


def paths(problems: tuple[Problem, ...]) -> list[str]:
    return [problem.path for problem in problems]


def test_the_document_of_the_seed_is_accepted_unchanged() -> None:
    assert documents.validate(SEED) == ()
    assert documents.load(SEED).data == SEED


@pytest.mark.parametrize(
    ("changes", "path", "words"), BROKEN, ids=lambda value: value if isinstance(value, str) else ""
)
def test_one_problem_with_its_path(changes: list[tuple[str, Any]], path: str, words: str) -> None:
    found = documents.validate(changed(*changes))
    assert set(paths(found)) == {path}
    assert words in "\n".join(map(str, found))


def test_there_are_forty_broken_documents() -> None:
    assert len(BROKEN) >= 40
    assert len({path for _, path, _ in BROKEN}) >= 40


def test_everything_is_said_at_once_in_the_order_of_the_document() -> None:
    broken = changed(
        ("model.dtype", "fp31"),
        ("sites.resid.component", "mlp_output"),
        (f"{P}.of", "lnes"),
        (f"{TOP1}.kind", "mtach"),
        ("steps.lens.rows.base", "nowhere"),
        (f"{SAVE}.file_path", "run.json"),
    )
    found = documents.validate(broken)
    assert sorted(paths(found)) == sorted(
        [
            "model.dtype",
            f"{READ}.view",
            f"{P}.of",
            f"{TOP1}.kind",
            "steps.lens.rows.base",
            "steps.lens.saves[0].file_path",
        ]
    )
    assert [p.partition(".")[0] for p in paths(found)] == ["model", *["interventions"] * 3, "steps", "steps"]
    with pytest.raises(DocumentError) as caught:
        documents.load(broken)
    assert caught.value.problems == found
    assert str(caught.value).splitlines()[0] == "document: 6 problems"
    assert isinstance(caught.value, InputError)


def test_a_problem_as_text() -> None:
    (problem,) = documents.validate(changed((f"{READ}.view", "logit")))
    assert str(problem) == (
        "interventions.lens.reads.lens.view: unknown value. Found: 'logit'. Allowed: 'logits'. Did you mean 'logits'?"
    )


def test_a_misspelt_field_is_one_problem() -> None:
    renamed = changed((f"{P}.token", REMOVED), (f"{P}.tokn", "base_answer"))
    assert paths(documents.validate(renamed)) == [f"{P}.tokn"]


def test_metrics_of_two_fields_share_a_pass() -> None:
    rows = [{"input": "a", "base_answer": "b", "other": "c"}]
    diff = {"kind": "logit_diff", "of": "lens", "target": "base_answer", "foil": "other"}
    both = changed(
        ("steps.lens.rows.base", rows),
        ("interventions.lens.metrics.diff", diff),
        ("interventions.lens.metrics.p_other", {"kind": "token_prob", "of": "lens", "token": "other"}),
    )
    assert documents.validate(both) == ()


# files


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("a.json", '{"header": {},\n "model": }', "line 2, column 11"),
        ("a.json", "", "line 1, column 1"),
        ("a.json", '{"model": 1', "line 1, column 12"),
        ("a.yaml", "header:\n  description: [a\nmodel: 3", "line 3, column 6"),
        ("a.yaml", "a: &x 1\nb: *x\n", "line 2, column 4"),
        ("a.yml", "model: 1\nmodel: 2\n", "line 2, column 1"),
        ("a.yaml", "model: \x01", "line 1, column 8"),
        ("a.yaml", "model:\n\t- 1", "line 2, column 1"),
    ],
)
def test_where_a_file_goes_wrong(tmp_path: Path, name: str, text: str, where: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = documents.validate(tmp_path / name)
    assert paths(found) == [where]
    assert ("no JSON" if name == "a.json" else "no YAML") in str(found[0])


def test_files_that_are_no_documents(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"a": "\xff"}')
    assert "no UTF-8 text" in str(documents.validate(tmp_path / "a.json")[0])
    (tmp_path / "a.json").write_text('{"a": 1, "a": 2}')
    assert "the name 'a' twice" in str(documents.validate(tmp_path / "a.json")[0])
    (tmp_path / "a.json").write_text("[" * 100_000)
    assert "nested too deeply" in str(documents.validate(tmp_path / "a.json")[0])
    (tmp_path / "a.json").write_text("[" * 100 + "]" * 100)
    assert "nested too deeply" in str(documents.validate(tmp_path / "a.json")[0])
    (tmp_path / "a.json").write_text('{"header": ' + "9" * 5000 + "}")
    assert "no JSON" in str(documents.validate(tmp_path / "a.json")[0])
    (tmp_path / "a.json").write_text('{"header": {"description": NaN}}')
    assert paths(documents.validate(tmp_path / "a.json")) == ["header.description"]
    (tmp_path / "a.json").write_text("[1]")
    assert paths(documents.validate(tmp_path / "a.json")) == ["(document)"]
    (tmp_path / "a.yaml").write_text("2: 3\n")
    assert "a name must be a text" in str(documents.validate(tmp_path / "a.yaml")[0])
    (tmp_path / "a.yaml").write_text("header: !!binary aGk=\n")
    assert "a bytes can't stand in a document" in str(documents.validate(tmp_path / "a.yaml")[0])
    with pytest.raises(InputError, match="ends in none of .json, .yaml, .yml"):
        documents.load(tmp_path / "a.toml")
    with pytest.raises(InputError, match="Can't read the document .*nothing.json"):
        documents.load(tmp_path / "nothing.json")


def test_yaml_says_the_same_as_json(tmp_path: Path) -> None:
    import yaml

    (tmp_path / "a.yaml").write_text(yaml.safe_dump(SEED, sort_keys=False), encoding="utf-8")
    assert documents.load(tmp_path / "a.yaml").data == SEED
    (tmp_path / "b.yaml").write_text("header: {description: 2024-01-01}\nmodel: {key: null}", encoding="utf-8")
    assert "header.description" not in paths(documents.validate(tmp_path / "b.yaml"))


@pytest.mark.parametrize("given", [None, 5, [], [SEED], b"lens.json", ""])
def test_what_is_no_document_at_all(given: Any) -> None:
    for ask in (documents.load, documents.validate, documents.Document):
        if given == "" and ask is documents.Document:
            continue
        with pytest.raises(
            InputError, match="A document is a .json, .yaml or .yml file, or its values as a dict, not "
        ):
            ask(given)


def test_a_path_that_is_none() -> None:
    with pytest.raises(InputError, match="path=5 is no path: give the document's file"):
        documents.Document(SEED, 5)  # type: ignore[arg-type]


def test_where_a_document_cant_be_saved(tmp_path: Path) -> None:
    document = documents.load(SEED)
    for name in ("a.txt", "out", "a.yaml"):
        with pytest.raises(InputError, match=rf"does not end in .json: save\('.*{name}.json'\)"):
            document.save(tmp_path / name)
    with pytest.raises(ArtifactError, match=r"Can't write '.*nodir/x/y.json': No such file or directory"):
        document.save(tmp_path / "nodir" / "x" / "y.json")
    with pytest.raises(InputError, match="path=5 is no path: give a file that ends in .json"):
        document.save(5)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_documents_values_are_a_copy() -> None:
    document = documents.load(SEED)
    data = document.data
    data["sites"]["resid"]["layers"] = [1]
    assert document.data == SEED
    assert documents.load(data).data == data


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    (tmp_path / "lens.json").write_text(json.dumps(changed(("model.key", "tiny"))), encoding="utf-8")
    (problem,) = documents.validate(tmp_path / "lens.json")
    assert str(problem).startswith(
        "model.revision: 'tiny' is a model on this machine, and only models on the hub have revisions. Found: "
    )
    (tmp_path / "lens.json").write_text(json.dumps(changed(("model", {"key": "tiny"}))), encoding="utf-8")
    assert documents.validate(tmp_path / "lens.json") == ()


# rows


@pytest.mark.parametrize(
    "place",
    ["data/weekdays/train.json", "data/weekdays/train.jsonl", "weekdays/train.json", "../data/weekdays/train.json"],
)
def test_rows_beside_the_document_come_first(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "v2"
    folder.mkdir()
    (folder / "lens.json").write_text(json.dumps(SEED), encoding="utf-8")
    own = [{"input": "Today is", "base_answer": "Monday"}] * 2
    file = folder / place
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(map(json.dumps, own))
    file.write_text(lines if place.endswith("l") else json.dumps(own), encoding="utf-8")
    document = documents.load(folder / "lens.json")
    (one,) = Plan.of(document.spec, document.folder).passes
    assert list(one.rows.records) == own
    assert one.rows.file is not None and one.rows.file.samefile(file)


def test_rows_that_the_package_ships(tmp_path: Path) -> None:
    from murano.documents.rows import find_rows

    weekdays = find_rows("weekdays/train", tmp_path)
    assert len(weekdays.records) == 28
    assert weekdays.records[0] == {"input": "Today is Monday. Tomorrow will be", "base_answer": " Tuesday"}
    assert len(find_rows("facts", tmp_path).records) == 215


def test_rows_that_cant_be_read(tmp_path: Path) -> None:
    (tmp_path / "lens.json").write_text(json.dumps(changed(("steps.lens.rows.base", "mine"))), encoding="utf-8")
    for text, words in [
        ("{", "mine.json, line 1, column 2: no JSON"),
        ("{}", "must hold a list of records, not dict"),
        ("[]", "mine.json has no rows"),
        ('["a"]', "row 0 of mine.json is no object"),
        ("[" * 100_000, "nested too deeply"),
    ]:
        (tmp_path / "mine.json").write_text(text, encoding="utf-8")
        (problem,) = documents.validate(tmp_path / "lens.json")
        assert problem.path == "steps.lens.rows.base"
        assert words in str(problem)
    (tmp_path / "mine.json").write_bytes(b"\xff")
    assert "is not UTF-8 (line 1, byte 0xff)" in str(documents.validate(tmp_path / "lens.json")[0])


# what is not loaded


def test_validation_needs_neither_torch_nor_a_model(tmp_path: Path) -> None:
    (tmp_path / "lens.json").write_text(json.dumps(SEED), encoding="utf-8")
    code = (
        "import sys; from murano import documents; "
        f"assert documents.validate({str(tmp_path / 'lens.json')!r}) == (); "
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# the command line


def test_murano_validate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(SEED), encoding="utf-8")
    bad.write_text(json.dumps(changed((f"{READ}.view", "logit"), (f"{P}.of", "lnes"))), encoding="utf-8")
    assert main(["validate", str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: valid, 1 step, 2 files a point\n"
    assert main(["validate", str(bad), str(good), str(tmp_path / "none.json")]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{good}: valid")
    assert [line.partition(":")[0] for line in printed.err.splitlines()] == [
        "murano",
        "  interventions.lens.reads.lens.view",
        "  interventions.lens.metrics.p_answer.of",
        "murano",
    ]
    assert main(["explain", str(bad)]) == 2
    assert main(["run", str(bad), "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    assert main(["validate"]) == 2


def test_the_json_schema(capsys: pytest.CaptureFixture[str]) -> None:
    import jsonschema

    assert main(["validate", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == documents.json_schema()
    check = jsonschema.Draft202012Validator(schema)
    check.check_schema(schema)
    assert list(check.iter_errors(SEED)) == []
    assert documents.validate({"$schema": "murano.schema.json", **SEED}) == ()
    assert paths(documents.validate({"$schema": 1, **SEED})) == ["['$schema']"]
    for changes, path, _ in BROKEN[:7]:
        if path != "header.schema_version":
            assert list(check.iter_errors(changed(*changes))), path


# fuzz: whatever a document holds, it is refused by name or taken

NAMES = st.sampled_from(
    ["lens", "base", "resid", "input", "base_answer", "p_answer", "logits", "sweep", "all", "", "\0list", "a.b"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | NAMES | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in items for place in places(item, (*at, key)))]


@st.composite
def damaged(draw: st.DrawFn) -> Any:
    """The seed's document with values replaced, removed, renamed or added somewhere."""
    document = changed()
    for _ in range(draw(st.integers(1, 3))):
        *inner, last = draw(st.sampled_from([p for p in places(document) if p]))
        at: Any = document
        for part in inner:
            at = at[part]
        what = draw(st.sampled_from(["replace", "remove", "rename", "add"]))
        if what == "replace" or isinstance(at, list):
            at[last] = draw(VALUES)
        elif what == "remove":
            del at[last]
        elif what == "rename":
            at[draw(st.text(max_size=8))] = at.pop(last)
        else:
            at[draw(NAMES)] = draw(VALUES)
        if not places(document)[1:]:
            break
    return document


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damaged())
def test_damage_never_gives_a_traceback(document: Any) -> None:
    found = documents.validate(document)
    for problem in found:
        assert problem.path and problem.what
        str(problem).encode()
    if not found:
        plan = Plan.of(documents.load(document).spec, Path(), n_layers=2)
        assert all(one.addresses(plan.points, None) for one in plan.passes)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(st.text(max_size=80), st.binary(max_size=60), VALUES, st.integers(0, 1500)),
    st.sampled_from(["json", "yaml"]),
)
def test_no_file_gives_a_traceback(tmp_path_factory: pytest.TempPathFactory, content: Any, ending: str) -> None:
    file = tmp_path_factory.getbasetemp() / f"fuzz.{ending}"
    if isinstance(content, int):  # the document of the seed, cut short
        data = json.dumps(SEED).encode()[:content]
    elif isinstance(content, bytes):
        data = content
    else:
        text = content if isinstance(content, str) else json.dumps(content)
        data = text.encode("utf-8", "surrogatepass")
    file.write_bytes(data)
    for problem in documents.validate(file):
        assert problem.path and problem.what
