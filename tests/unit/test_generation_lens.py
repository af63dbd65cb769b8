"""What a generation leaves behind: its numbers, its text, its figures, its files, and the command line that makes one."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from support.lenses import NASTY, make_generation
from support.reading import held

from murano import Address, Pipeline, Prompt, keys, load_artifact, load_run, save_artifact
from murano.artifacts.generation_lens import GenerationLensResult
from murano.artifacts.words import TokenWords
from murano.cli import main
from murano.errors import InputError
from murano.plotting import plot_agreement, plot_generation, save_figure
from murano.plotting.generation import agreement_curve, generation_grid
from murano.prompts import PromptBatch
from murano.steps import FollowGeneration, LoadPrompts, Plot, Save

NAN = float("nan")
WORDS = {1: " Paris", 2: ".", 3: " France", 4: " The"}


@pytest.fixture
def lens() -> GenerationLensResult:
    """Three layers, two prompts: the first has three steps, the second ended after one."""
    top = torch.tensor([[[3, 2, 3], [2, -1, -1]], [[1, 3, 3], [2, -1, -1]], [[1, 2, 4], [2, -1, -1]]]).unsqueeze(-1)
    gone = torch.tensor([[False, False, False], [False, True, True]])
    probs = torch.full((3, 2, 3), 0.5).masked_fill(gone, NAN)
    return GenerationLensResult(
        addresses=tuple(map(Address, range(3))),
        top_ids=top.int(),
        top_probs=probs.unsqueeze(-1),
        entropy=probs,
        log_normalizer=probs,
        sampled_ids=torch.tensor([[1, 2, 4], [2, -1, -1]]),
        sampled_log_probs=probs.log(),
        sampled_ranks=torch.where(gone, -1, 0).expand(3, 2, 3).int(),
        own_log_probs=probs[0].log(),
        input_ids=torch.tensor([[-1, 3], [4, 3]]),
        texts=(" Paris. The", "."),
        finished=("length", "end"),
        words=TokenWords(WORDS),
        settings={"max_new_tokens": 3},
        cache="cache",
        model={"model_id": "tiny", "n_layers": 3},
        prompts=PromptBatch([Prompt(text="The capital is"), Prompt(text="So")]),
        notes=("Something.",),
    )


def test_agreement(lens: GenerationLensResult) -> None:
    assert lens.agreement[:, 0].tolist() == [[False, True, False], [True, False, False], [True, True, True]]
    assert lens.agreement[:, 1].tolist() == [[True, False, False]] * 3
    assert lens.agreement_by_layer().tolist() == [0.5, 0.5, 1.0]
    assert torch.allclose(lens.agreement_by_layer(0), torch.tensor([1 / 3, 1 / 3, 1.0]))
    assert lens.agreement_by_layer(1).tolist() == [1.0, 1.0, 1.0]
    assert lens.settled().tolist() == [[1, 2, 2], [0, -1, -1]]
    assert lens.steps_mask.tolist() == [[True, True, True], [True, False, False]]


def test_pairs_read_as_a_list_of_guess_and_sampled(lens: GenerationLensResult) -> None:
    assert lens.pairs(0) == [(" France", " Paris"), (".", "."), (" France", " The")]
    assert lens.pairs(-1) == [(" Paris", " Paris"), (".", "."), (" The", " The")]
    assert lens.pairs(1, prompt=1) == [(".", ".")]
    with pytest.raises(InputError, match="'L7.resid_post' was not read. Read: L0.resid_post, L1"):
        lens.pairs(7)
    with pytest.raises(InputError, match="Prompt 2 does not exist: there are 2"):
        lens.pairs(0, prompt=2)


def test_printed(lens: GenerationLensResult) -> None:
    assert str(lens) == (
        "GenerationLensResult(tiny: 3 layers (L0.resid_post … L2.resid_post) × 2 prompts × 3 steps, top 1)\n"
        "\n"
        "'The capital is' → ' Paris. The' (max_new_tokens was reached)\n"
        "L0.resid_post    1/3  (' France', ' Paris'), ('.', '.'), (' France', ' The')\n"
        "L1.resid_post    1/3  (' Paris', ' Paris'), (' France', '.'), (' France', ' The')\n"
        "L2.resid_post    3/3  (' Paris', ' Paris'), ('.', '.'), (' The', ' The')\n"
        "\n"
        "'So' → '.' (the model ended its text)\n"
        "L0.resid_post    1/1  ('.', '.')\n"
        "L1.resid_post    1/1  ('.', '.')\n"
        "L2.resid_post    1/1  ('.', '.')\n"
        "\n"
        "note: Something."
    )
    assert lens.text(layers=1).count("resid_post  ") == 2
    assert lens._repr_html_().startswith("<pre>GenerationLensResult(tiny")


def test_one_step_as_a_table(lens: GenerationLensResult) -> None:
    column = lens.at(0, 1)
    assert column.words == (".", " France", ".") and [text for text, _, _ in column.answers] == ["."]
    assert "p('.')" in str(column)
    assert lens.at(1, -1).words == (".", ".", ".")
    with pytest.raises(InputError, match="Step 1 of prompt 1 does not exist: it has 1; the last is -1"):
        lens.at(1, 1)


def test_cut_to_some_prompts(lens: GenerationLensResult) -> None:
    one = lens[1]
    assert (one.n_prompts, one.texts, one.finished) == (1, (".",), ("end",))
    assert one.top_ids.shape == (3, 1, 1, 1) and one.own_log_probs.shape == (1, 1)
    assert one.prompts is not None and one.prompts.texts == ["So"]
    assert [len(x) for x in (lens, list(lens), lens[:1], lens[[1, 0]])] == [2, 2, 1, 2]
    assert lens[[1, 0]].sampled_ids.tolist() == [[2, -1, -1], [1, 2, 4]]
    with pytest.raises(InputError, match="Prompt 2 does not exist"):
        lens[2]


def test_saved_and_loaded(lens: GenerationLensResult, tmp_path: Path) -> None:
    save_artifact(tmp_path / "lens.pt", lens)
    again = load_artifact(tmp_path / "lens.pt")
    assert isinstance(again, GenerationLensResult)
    assert str(again) == str(lens)
    for name in ("top_ids", "sampled_ids", "sampled_log_probs", "sampled_ranks", "own_log_probs", "input_ids"):
        assert torch.equal(torch.nan_to_num(getattr(again, name)), torch.nan_to_num(getattr(lens, name)))
    assert dict(again.settings) == {"max_new_tokens": 3} and again.cache == "cache"


def test_a_pipeline_saves_the_generation_with_its_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = held("llama")
    steps = [LoadPrompts([[20, 21, 22], [30]]), FollowGeneration(model, 4, include_prompt=True)]
    Pipeline(steps).explain()
    assert "up to 4 tokens by the most probable token; layers 'all', top 5" in capsys.readouterr().out
    results = Pipeline([*steps, Plot(tmp_path / "plots"), Save(tmp_path, "run")]).run(resume=tmp_path / "run")
    lens, again = results[keys.GENERATION_LENS], load_run(tmp_path / "run")[keys.GENERATION_LENS]
    assert again.words.of(again.top_ids, again.sampled_ids) == lens.words.of(lens.top_ids, lens.sampled_ids)
    assert again.prompt_lens.predicted_words == lens.prompt_lens.predicted_words
    assert str(again) == str(lens)
    names = [Path(file).name for file in results[keys.PLOTS]]
    assert names == ["generation_lens_agreement.png", "generation_lens_0.png", "generation_lens_1.png"]
    resumed = Pipeline([*steps, Save(tmp_path, "run")]).run(resume=tmp_path / "run")
    assert resumed.history[1].skipped


def test_the_heatmap(lens: GenerationLensResult) -> None:
    grid = generation_grid(lens, 0)
    assert [row.split() for row in grid.rows] == [["0", "33%"], ["1", "33%"], ["2", "100%"]]
    assert [words[0] for words in grid.below if words] == [" Paris", ".", " The"]
    assert grid.words is not None and grid.words[1][1] == [" France"]
    assert grid.settled == {0: 1, 1: 2, 2: 2}
    assert (grid.scale.unit, grid.values.tolist()) == ("probability of the written token", [[0.5] * 3] * 3)
    assert generation_grid(lens, 0, "sampled_rank").values.min() == 1  # from 1, as the colour bar says
    assert generation_grid(lens, 0, layers=[1]).settled == {}
    assert plot_generation(lens, 1).get_xlabel().startswith("what was written (end)")
    for bad, message in (
        ({"value": "probs"}, "value='probs' is unknown. Did you mean 'prob'"),
        ({"prompt": 5}, "Prompt 5 does not exist"),
    ):
        with pytest.raises(InputError, match=message):
            generation_grid(lens, **bad)
    with pytest.raises(InputError, match="A GenerationLensResult is needed, not int"):
        generation_grid(3)  # type: ignore[arg-type]


def test_the_agreement_curve(lens: GenerationLensResult) -> None:
    curve = agreement_curve(lens)
    assert curve.share.tolist() == [0.5, 0.5, 1.0]
    assert curve.by_prompt[1].tolist() == [1.0, 1.0, 1.0]
    assert (curve.layers, curve.title) == (["0", "1", "2"], "tiny, 4 steps of 2 prompts")
    ax = plot_agreement(lens, layers=[0, 2])
    assert ax.lines[-1].get_ydata().tolist() == [0.5, 1.0]  # type: ignore[union-attr]
    assert len(ax.lines) == 3


def test_the_step_is_written_as_it_was_typed() -> None:
    model = held("llama")
    step = FollowGeneration(model, max_new_tokens=4, temperature=0.5, seed=1)
    assert repr(step) == f"FollowGeneration({model!r}, max_new_tokens=4, temperature=0.5, seed=1)"
    assert "temperature 0.5" in step.describe()
    with pytest.raises(InputError, match="FollowGeneration needs a MuranoModel, not a str"):
        FollowGeneration("gpt2", 4)
    with pytest.raises(InputError, match="takes no 'max_chunk_byte'. Did you mean 'max_chunk_bytes'"):
        FollowGeneration(model, 4, max_chunk_byte=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--generate", "0", "x"], "max_new_tokens=0"),
        (["--stop", "x", "y"], "--stop needs --generate N"),
        (["--chat", "y"], "--chat needs --generate N"),
        (["--generate", "3", "--positions", "all", "x"], "--positions and --generate exclude each other"),
        (["--generate", "3", "--target", "a", "x"], "--target and --generate exclude each other"),
        (["--generate", "3", "--foil", "a", "x"], "--foil and --generate exclude each other"),
        (["--generate", "3", "--top-p", "0.5", "x"], "draws nothing at temperature 0"),
        (["--generate", "3", "--seed", "5", "x"], "seed=5 draws nothing at temperature 0"),
        (
            ["--generate", "3", "--plot", "g.html", "x"],
            "--plot 'g.html': a generation has no page. Its figures are one of .png, .pdf, .svg.",
        ),
    ],
)
def test_the_command_line_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lens", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_command_line_follows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, run = tmp_path / "g.png", tmp_path / "run"
    common = ["lens", "--generate", "3", "--layers", "20,29", "-q"]
    assert main([*common, "The capital of France is", "--plot", str(plot), "--save", str(run)]) == 0
    out = capsys.readouterr().out
    assert "'The capital of France is' → ' Paris" in out
    assert "L29.resid_post    3/3  (' Paris', ' Paris')" in out
    assert plot.exists() and (tmp_path / "g-agreement.png").exists()
    assert load_run(run)[keys.GENERATION_LENS].texts[0].startswith(" Paris")
    assert main([*common, "--json", "--chat", "--temperature", "0.7", "--seed", "3", "Hello!"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["settings"]["seed"] == 3
    (prompt,) = shown["prompts"]
    assert len(prompt["steps"]) == 3 and prompt["steps"][0]["layers"][1]["address"] == "L29.resid_post"


@pytest.mark.parametrize("generate", [[], ["--generate", "2"]], ids=["lens", "generation"])
def test_a_figure_that_fails_loses_nothing(
    generate: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object) -> str:
        raise InputError("The figure fails.")

    monkeypatch.setattr("murano.plotting.save_figure", fail)
    plot, run = tmp_path / "g.png", tmp_path / "run"
    common = ["lens", *generate, "--layers", "29", "--plot", str(plot), "--save", str(run)]
    assert main([*common, "The capital of France is"]) == 2
    assert "The figure fails." in capsys.readouterr().err
    assert (keys.GENERATION_LENS if generate else keys.LOGIT_LENS) in load_run(run)


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_nasty_tokens_are_drawn(ending: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Whatever the model writes: no exception, no warning, a column for each step."""
    lens = make_generation(layers=3, prompts=1, steps=len(NASTY), words=NASTY)
    ax = plot_generation(lens, max_columns=len(NASTY))
    save_figure(ax, tmp_path / f"g.{ending}")
    assert len(ax.get_xticklabels()) == len(NASTY)
    save_figure(plot_agreement(lens), tmp_path / f"a.{ending}")
    assert not [str(w.message) for w in recwarn if issubclass(w.category, UserWarning)]
    plt.close("all")
