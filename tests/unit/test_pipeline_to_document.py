"""A pipeline becomes a document that gives the same numbers, or an error that says what documents don't have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from murano import Pipeline, documents, keys
from murano.errors import InputError
from murano.model import MuranoModel
from murano.steps import LoadPrompts, LogitDiff, LogitLens, Match, PredictionDepth, Save, TokenProb

PROMPTS = LoadPrompts(
    ["The capital of France is the city of", "Paris is in"],
    targets=["Paris", ["France", "Italy"]],
    foils=["Rome", "London"],
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MuranoModel:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return MuranoModel(str(path), dtype="float32")


@pytest.mark.parametrize(
    ("layers", "positions", "position"),
    [("all", "last", -1), ([0, 2], [-1], -1), (["L2.resid_pre", "L1.resid_pre"], [-2, -1], -2), ("ln_final", -1, -1)],
)
def test_the_same_numbers(model: MuranoModel, tmp_path: Path, layers: Any, positions: Any, position: int) -> None:
    options = {} if position == -1 else {"position": position}
    pipeline = Pipeline(
        [
            PROMPTS,
            LogitLens(model, layers, positions, apart=True),
            TokenProb(**options),
            Match(**options),
            LogitDiff(**options),
        ]
    )
    document = documents.load(pipeline.to_document("two cities").save(tmp_path / "lens.json"))
    assert document.spec.header.description == "two cities"
    assert documents.validate(json.loads(document.to_json())) == ()
    run, results = document.run(model=model), pipeline.run()
    # A document reads the positions that its metrics look at, and a product of fewer rows may round differently.
    few = position != -1
    for key in (keys.TOKEN_PROB, keys.MATCH, keys.LOGIT_DIFF):
        ours, theirs = run.table(str(key)).values, results[key].values
        assert torch.allclose(ours, theirs, atol=1e-5) if few else torch.equal(ours, theirs)
    (again,) = document.pipelines(model)
    assert torch.equal(again.run()[keys.LOGIT_DIFF].values, run.table("logit_diff").values)


def test_what_it_says(model: MuranoModel) -> None:
    data = Pipeline([PROMPTS, LogitLens(model, positions="last"), TokenProb(), TokenProb(of="foil")]).to_document().data
    assert data["model"] == {"key": model.source, "dtype": "fp32"}
    assert data["sites"] == {"stream": {"component": "block_output", "layers": {"sweep": "all"}}}
    assert data["interventions"]["lens"]["metrics"] == {
        "token_prob": {"kind": "token_prob", "of": "lens", "token": "target"},
        "token_prob_2": {"kind": "token_prob", "of": "lens", "token": "foil"},
    }
    assert data["steps"]["lens"]["rows"]["base"] == [
        {"input": "The capital of France is the city of", "target": "Paris", "foil": "Rome"},
        {"input": "Paris is in", "target": ["France", "Italy"], "foil": "London"},
    ]


def test_a_relative_folder_is_written_out(model: MuranoModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(str(model.source)).parent)
    near = MuranoModel("tiny", dtype="float32")
    data = Pipeline([PROMPTS, LogitLens(near, positions="last"), TokenProb()]).to_document().data
    assert data["model"] == {"key": model.source, "dtype": "fp32"}


def test_another_tokenizer_is_refused_where_it_reads_otherwise(model: MuranoModel, tmp_path: Path) -> None:
    def pipeline(tokenizer: Any, source: Any = model.source) -> Pipeline:
        other = MuranoModel(source, dtype="float32", tokenizer=tokenizer)
        return Pipeline([PROMPTS, LogitLens(other, positions="last"), TokenProb()])

    wanted = Pipeline([PROMPTS, LogitLens(model, positions="last"), TokenProb()]).to_document()
    assert pipeline(tiny_tokenizer()).to_document().data == wanted.data  # it reads everything as the model's own does
    with pytest.raises(
        InputError, match="was given reads 'The capital of France is the city of' as other tokens. Save both"
    ):
        pipeline(tiny_tokenizer(bos=True)).to_document()
    with pytest.raises(InputError, match="was given reads 'The capital .* as other tokens"):
        wanted.run(model=MuranoModel(model.source, dtype="float32", tokenizer=tiny_tokenizer(bos=True)))
    tiny_model("llama").save_pretrained(tmp_path / "bare")
    with pytest.raises(InputError, match="the tokenizer that lies beside it, and '.*bare' has none"):
        pipeline(tiny_tokenizer(), str(tmp_path / "bare")).to_document()


class Louder(LogitLens):
    """A step that does something else."""


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (lambda m: [PROMPTS, LogitLens(m, positions="last")], "made of LoadPrompts, LogitLens, then TokenProb"),
        (
            lambda m: [PROMPTS, LogitLens(m, positions="last"), PredictionDepth()],
            r"PredictionDepth \(step 3\) has no place",
        ),
        (lambda m: [PROMPTS, LogitLens(m, positions="last"), Match(), Save("x")], r"Save \(step 4\) has no place"),
        (lambda m: [PROMPTS, LogitLens(m), Match()], "positions='all' are not"),
        (lambda m: [PROMPTS, LogitLens(m, [0, "embeddings"], "last"), Match()], "the layers of one component"),
        (lambda m: [PROMPTS, LogitLens(m, "L1.resid_mid", "last"), Match()], "not of resid_mid"),
        (lambda m: [PROMPTS, LogitLens(m, positions="last", stats="kl"), Match()], r"no place for LogitLens\(stats="),
        (
            lambda m: [PROMPTS, LogitLens(m, positions="last", keep="residuals"), Match()],
            r"no place for LogitLens\(keep=",
        ),
        (lambda m: [PROMPTS, LogitLens(m, positions="last", target_mode="sequence"), Match()], "by its first token"),
        (
            lambda m: [PROMPTS, LogitLens(m, positions="last", on_error="skip"), Match()],
            r"no place for LogitLens\(on_error=",
        ),
        (
            lambda m: [PROMPTS, LogitLens(m, positions=[-2, -1]), Match(position=5)],
            "is of position 5, which is not read",
        ),
        (lambda m: [LoadPrompts(["Paris"]), LogitLens(m, positions="last"), Match()], "has no field 'target'"),
        (
            lambda m: [PROMPTS, LogitLens(MuranoModel(m.hf_model, tokenizer=m.tokenizer), positions="last"), Match()],
            "was handed in as an object",
        ),
        (lambda m: [PROMPTS, Louder(m, positions="last"), Match()], "here is LoadPrompts, Louder, Match"),
        (
            lambda m: [PROMPTS, LogitLens(MuranoModel(m.source, trust_remote_code=True), positions="last"), Match()],
            "never lets code run that comes with a model",
        ),
    ],
)
def test_what_documents_dont_have(model: MuranoModel, steps: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Pipeline(steps(model)).to_document()
