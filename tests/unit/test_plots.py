"""Figures of a lens: what is in them, value by value, and that they leave nothing behind."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from support.lenses import NASTY, make_generation, make_lens

from murano import keys
from murano.address import Address
from murano.artifacts.logit_lens import LogitLensResult
from murano.errors import ArtifactError, InputError
from murano.metrics import prediction_depth
from murano.plotting import (
    draw_results,
    plot_agreement,
    plot_decided,
    plot_difference,
    plot_generation,
    plot_lens,
    plot_overview,
    plot_trajectories,
    save_figure,
)
from murano.plotting.files import MOST_PIXELS, figure_bytes
from murano.results import Results
from murano.steps.plot import Plot


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    before = dict(matplotlib.rcParams)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert dict(matplotlib.rcParams) == before
    plt.close("all")


def cells(ax: Any, rows: int) -> list[list[str]]:
    """The texts in the cells, bottom row first."""
    texts = [text for text in ax.texts if "not shown" not in text.get_text() and text.get_text() != "⋯"]
    return [[text.get_text() for text in texts if round(text.get_position()[1]) == row] for row in range(rows)]


def below(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_xticklabels()]


def above(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.child_axes[-1].get_xticklabels()]


def numbers(ax: Any) -> Any:
    return np.ma.filled(ax.collections[0].get_array(), np.nan)


def settled_rows(ax: Any) -> list[float]:
    return [patch.get_y() + 0.5 for patch in ax.patches if patch.get_gid() == "settled"]


# -- the heatmap -------------------------------------------------------------------------------


def test_cells_hold_the_predictions_and_their_probabilities() -> None:
    lens = make_lens()
    ax = plot_lens(lens)
    assert np.array_equal(numbers(ax), lens.max_probs[:, 0].numpy())
    assert cells(ax, 4) == [[w.replace(" ", "·") for w in lens.predicted_words[layer][0]] for layer in range(4)]
    assert below(ax) == ["·Paris", "·London", "·the", "·a", "·Rome"]
    assert above(ax) == cells(ax, 4)[-1]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["0", "1", "2", "3"]
    assert ax.get_ylim() == (-0.5, 3.5), "layer 0 is at the bottom"
    assert ax.get_ylabel() == "layer" and ax.get_title() == "org/model_$1$"
    bar = ax.child_axes[0]
    assert bar.get_ylabel() == "probability" and bar.get_ylim() == (0, 1)


def test_the_layer_at_which_the_answer_settles_is_framed() -> None:
    lens = make_lens(layers=5)
    lens.top_ids[:, 0, -1, 0] = torch.tensor([4, 3, 4, 4, 4])
    ax = plot_lens(lens)
    assert settled_rows(ax) == [2] and "layer 2" in ax.get_xlabel()
    assert settled_rows(plot_lens(lens, layers=[0, 1, 3])) == [2], "the first row shown at or above it"
    assert not settled_rows(plot_lens(lens, layers=[0, 1]))
    partial = dataclasses.replace(lens, model={"n_layers": 9})
    ax = plot_lens(partial)
    assert not settled_rows(ax) and len(ax.child_axes) == 1, "the model's own prediction was not read"


def test_other_statistics() -> None:
    lens = make_lens()
    lens = dataclasses.replace(
        lens, stats={"kl": lens.entropy * 2, "rank": lens.entropy.round() + 1, "gap": lens.entropy - 1}
    )
    ax = plot_lens(lens, value="entropy")
    assert np.array_equal(numbers(ax), lens.entropy[:, 0].numpy())
    assert ax.child_axes[0].get_ylabel() == "entropy (nats)"
    for name, unit in (("kl", "KL divergence (nats)"), ("rank", "rank of the target (1 = first)"), ("gap", "gap")):
        ax = plot_lens(lens, value=name)
        assert np.array_equal(numbers(ax), lens.stats[name][:, 0].numpy())
        assert ax.child_axes[0].get_ylabel() == unit
        ax.figure.canvas.draw()


def test_padding_is_left_out() -> None:
    lens = make_lens(prompts=2, positions=6, lengths=[6, 3])
    ax = plot_lens(lens, prompt=1)
    assert below(ax) == ["·Paris", "·London", "·the"]
    assert np.array_equal(numbers(ax), lens.max_probs[:, 1, 3:].numpy())
    assert ax.get_title().endswith("prompt 1")


def test_layers_and_positions_are_chosen() -> None:
    lens = make_lens(layers=6, positions=8)
    ax = plot_lens(lens, layers=["L5", 2], positions=[-1, 0, 1])
    assert [text.get_text() for text in ax.get_yticklabels()] == ["2", "5"], (
        "as the data flows, whatever the order asked for"
    )
    assert below(ax) == ["·Paris", "·London", "·E"]
    shown = numbers(ax)
    assert shown.shape == (2, 4) and np.isnan(shown[:, 2]).all(), "the place of what lies between"
    assert np.array_equal(np.delete(shown, 2, 1), lens.max_probs[[2, 5]][:, 0][:, [0, 1, 7]].numpy())
    for layers, shown in (("1-3", "123"), (slice(0, 3), "012"), ("4:,0", "045"), (-1, "5"), ((3, "resid_post"), "3")):
        assert [text.get_text() for text in plot_lens(lens, layers=layers).get_yticklabels()] == list(shown)
    assert below(plot_lens(lens, positions=slice(-2, None))) == ["The", "·E"]
    assert below(plot_lens(lens, positions=-1)) == ["·E"]


def test_long_prompts_are_folded_with_a_mark() -> None:
    lens = make_lens(positions=128)
    ax = plot_lens(lens)
    assert len(below(ax)) == 40 and numbers(ax).shape == (4, 41)
    assert any("88 not shown" in text.get_text() or text.get_text() == "⋯" for text in ax.texts)
    assert np.array_equal(numbers(ax)[:, -30:], lens.max_probs[:, 0, -30:].numpy()), "the end matters most"
    whole = plot_lens(lens, max_columns=128)
    assert len(below(whole)) == 128 and numbers(whole).shape == (4, 128) and not whole.texts
    assert len(below(plot_lens(lens, max_columns=1))) == 1


def test_tokens_that_read_alike_stay_two_columns() -> None:
    lens = make_lens(words=["same", "same", "same", "other"], positions=4)
    ax = plot_lens(lens)
    assert below(ax) == ["same", "same", "same", "other"] and numbers(ax).shape == (4, 4)


def test_text_is_legible_on_its_cell() -> None:
    lens = make_lens(positions=2)
    lens.top_probs[..., 0] = torch.tensor([[[0.02, 0.98]]])
    colours = {text.get_color() for text in plot_lens(lens).texts}
    assert colours == {"#1a1a1a", "#ffffff"}


def test_what_could_not_be_read_is_a_dash() -> None:
    lens = make_lens()
    lens.top_ids[1, 0, 2], lens.top_probs[1, 0, 2] = -1, float("nan")
    ax = plot_lens(lens)
    assert cells(ax, 4)[1][2] == "–" and np.isnan(numbers(ax)[1, 2])


def test_other_places_on_the_stream() -> None:
    lens = make_lens(layers=4)
    places = tuple(map(Address.parse, ("embeddings", "L0", "L1", "ln_final")))
    ax = plot_lens(dataclasses.replace(lens, addresses=places))
    assert [text.get_text() for text in ax.get_yticklabels()] == ["embeddings", "0", "1", "ln_final"]
    mixed = tuple(map(Address.parse, ("L0.resid_mid", "L0", "L1.resid_mid", "L1")))
    ax = plot_lens(dataclasses.replace(lens, addresses=mixed))
    assert ax.get_yticklabels()[0].get_text() == "L0.resid_mid"


def test_given_axes_are_used_as_they_are() -> None:
    figure = Figure(figsize=(6, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    lens = make_lens(positions=30, layers=30)
    before = plt.get_fignums()
    assert plot_lens(lens, ax=left) is left and plot_trajectories(lens, ax=right) is right
    assert tuple(figure.get_size_inches()) == (6, 3) and plt.get_fignums() == before
    figure.savefig(os.devnull, format="png")


def test_what_is_not_one_axes_is_refused() -> None:
    figure = Figure()
    grid = figure.subplots(2, 2)
    given = [
        (grid, "give one Axes, not several in a ndarray: ax=axes[0, 0]."),
        (grid[0], "give one Axes, not several in a ndarray: ax=axes[0]."),
        ((figure, grid[0, 0]), "give one Axes, not several in a tuple: ax=axes[1]."),
        ({"left": grid[0, 0]}, "give one Axes, not several in a dict: ax=axes['left']."),
        (figure, "give one Axes, not a Figure: ax=figure.add_subplot()."),
        ("x", "give one Axes, as plt.subplots() makes them, not 'x'; without ax a new figure is made."),
        (Figure().add_subplot(projection="3d"), "give flat Axes, not '3d' ones: ax=figure.add_subplot()."),
        (Figure().add_subplot(projection="polar"), "give flat Axes, not 'polar' ones: ax=figure.add_subplot()."),
    ]
    lens, generation = make_lens(), make_generation()
    table = prediction_depth(make_lens(prompts=3))
    draws: list[Any] = [
        lambda ax: plot_lens(lens, ax=ax),
        lambda ax: plot_difference(lens, lens, ax=ax),
        lambda ax: plot_overview(lens, ax=ax),
        lambda ax: plot_trajectories(lens, ax=ax),
        lambda ax: plot_generation(generation, ax=ax),
        lambda ax: plot_agreement(generation, ax=ax),
        lambda ax: plot_decided(table, ax=ax),
    ]
    for draw in draws:
        for ax, message in given:
            with pytest.raises(InputError) as error:
                draw(ax)
            assert str(error.value) == f"ax: {message}"


def test_size_follows_content() -> None:
    small, large = plot_lens(make_lens(layers=2, positions=2)), plot_lens(make_lens(layers=30, positions=30))
    assert (large.figure.get_size_inches() > small.figure.get_size_inches()).all()
    plot_lens(make_lens(layers=1, positions=1)).figure.canvas.draw()


# -- the other figures -------------------------------------------------------------------------


def test_difference() -> None:
    a, b = make_lens(), make_lens(seed=1)
    ax = plot_difference(a, b)
    assert np.allclose(numbers(ax), (a.max_probs - b.max_probs)[:, 0].numpy())
    one, other = (lens.predicted_words[0][0][0].replace(" ", "·") for lens in (a, b))
    assert cells(ax, 4)[0][0] == (one if one == other else f"{one}\n{other}")
    low, high = ax.child_axes[0].get_ylim()
    assert low == -high and ax.child_axes[0].get_ylabel() == "difference in probability"
    same = plot_difference(a, a)
    assert not numbers(same).any() and cells(same, 4) == cells(plot_lens(a), 4)
    assert plot_difference(a, b, names=("base", "tuned")).get_title() == "base − tuned"
    for names in (("a",), "ab", ("a", 5), ()):
        with pytest.raises(InputError, match="give two, one for each lens: names=\\('base', 'tuned'\\)"):
            plot_difference(a, b, names=names)  # type: ignore[arg-type]


def test_models_go_by_the_last_part_of_their_path() -> None:
    a, b = (dataclasses.replace(make_lens(seed=i), model={"model_id": f"/data/runs/model_{i}/"}) for i in (0, 1))
    ax = plot_difference(a, b)
    assert ax.get_title() == "model_0 − model_1" and "model_0 above, model_1 below" in ax.get_xlabel()
    assert plot_lens(a).get_title() == "model_0"
    long = plot_lens(dataclasses.replace(a, model={"model_id": "org/" + "x" * 99})).get_title()
    assert long.startswith("org/xxx") and "…" in long and len(long) == 40


def test_titles_do_not_run_over_neighbours() -> None:
    models = ("org/a-model-with-a-long-name-of-its-own", "org/another-one-with-a-name-that-is-long")
    a, b = (dataclasses.replace(make_lens(seed=i), model={"model_id": name}) for i, name in enumerate(models))
    figure = Figure(figsize=(9, 3))
    axes = figure.subplots(1, 3)
    plot_difference(a, b, ax=axes[0])
    plot_trajectories(a, ax=axes[1])
    plot_overview(a, ax=axes[2])
    figure.canvas.draw()
    for ax in axes:
        for text in (ax.title, ax.xaxis.label):
            assert text.get_window_extent().width <= 1.02 * 9 / 3 * figure.dpi * 0.8, text.get_text()
        assert ax.get_title().count("\n") <= 1


def test_difference_meets_where_both_were_read() -> None:
    a = make_lens(layers=4)
    wide = make_lens(layers=4, positions=7, lengths=[5])  # the same prompt in a batch with a longer one
    ax = plot_difference(a, wide)
    assert np.allclose(numbers(ax), (a.max_probs[:, 0] - wide.max_probs[:, 0, 2:]).numpy())
    deeper = make_lens(layers=6)
    assert numbers(ax := plot_difference(a, deeper)).shape == (4, 5)
    assert ax.get_title().endswith(": a − b (not drawn: 2 layers that one of them lacks)")
    assert "not drawn" not in plot_difference(deeper, a, layers=[0, 1]).get_title()
    with pytest.raises(InputError, match="different prompts: token 0"):
        plot_difference(a, dataclasses.replace(a, input_ids=a.input_ids + 1))
    with pytest.raises(InputError, match="'L5.resid_post' was not read"):
        plot_difference(deeper, a, layers=[5])


def test_trajectories() -> None:
    lens = make_lens(layers=6, k=3)
    ax = plot_trajectories(lens)
    winners = list(dict.fromkeys(lens.predicted_tokens[:, 0, -1].tolist()))
    assert len(ax.lines) == len(winners)
    for line, token in zip(ax.lines, winners, strict=True):
        for layer, value in enumerate(np.asarray(line.get_ydata(), dtype=float)):
            kept = lens.top_ids[layer, 0, -1].tolist()
            assert (value == lens.top_probs[layer, 0, -1, kept.index(token)]) if token in kept else np.isnan(value)
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == [*(lens.words[t].replace(" ", "·") for t in winners), "outside the top 3"]
    final = lens.words[int(lens.predicted_tokens[-1, 0, -1])]
    assert len(plot_trajectories(lens, tokens=[final]).lines) == 1
    assert len(plot_trajectories(lens, tokens=winners[0], position=-1).lines) == 1


def test_trajectories_of_tokens_that_read_alike() -> None:
    lens = make_lens(words=["same", "same", "_x", "_x"], layers=6, k=4)
    texts = [text.get_text() for text in plot_trajectories(lens, tokens=[0, 1, 2]).get_legend().get_texts()]
    assert texts[:3] == ["same  (id 0)", "same  (id 1)", "_x"]
    assert len(plot_trajectories(lens, tokens="same").lines) == 2


def test_overview() -> None:
    lens = make_lens(prompts=12, positions=3)
    ax = plot_overview(lens)
    assert np.array_equal(numbers(ax), lens.max_probs[:, :, -1].numpy())
    assert below(ax) == [str(prompt) for prompt in range(12)]
    assert cells(ax, 4)[0][3] == lens.predicted_words[0][3][-1].replace(" ", "·")
    (line,) = (line for line in ax.lines if line.get_gid() == "settled")
    assert len(line.get_xdata()) == 24


def test_overview_of_many_is_sorted() -> None:
    lens = make_lens(prompts=500, positions=2, layers=8)
    ax = plot_overview(lens)
    (line,) = ax.lines
    steps = np.asarray(line.get_ydata(), dtype=float)
    assert (np.diff(steps) >= 0).all() and numbers(ax).shape == (8, 500) and not ax.texts
    shown = [(int(text.get_text()), round(text.get_position()[0] - 0.5)) for text in ax.get_xticklabels()]
    assert len(shown) > 5 and [prompt for prompt, _ in shown] != sorted(prompt for prompt, _ in shown)
    for prompt, column in shown:  # the numbers are those of the prompts, not places in the order
        assert np.array_equal(numbers(ax)[:, column], lens.max_probs[:, prompt, -1].numpy())
    assert np.array_equal(numbers(plot_overview(lens, sort=False)), lens.max_probs[:, :, -1].numpy())


# -- nasty tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("file_format", ["png", "svg", "pdf"])
def test_nasty_tokens_through_every_figure(file_format: str, tmp_path: Path, caplog: Any) -> None:
    lens = make_lens(words=NASTY, positions=len(NASTY), layers=3, k=len(NASTY))
    # Each token is predicted once: layer 1 predicts token i at position i.
    lens.top_ids[1, 0, :, 0] = torch.arange(len(NASTY))
    other = dataclasses.replace(
        make_lens(words=NASTY, positions=len(NASTY), layers=3, seed=1), model={"model_id": "$_"}
    )
    axes = [
        plot_lens(lens),
        plot_difference(lens, other),
        plot_trajectories(lens, tokens=list(range(len(NASTY)))),
        plot_overview(make_lens(words=NASTY, prompts=20, positions=2)),
    ]
    assert len(below(axes[0])) == len(NASTY) == numbers(axes[0]).shape[1]
    assert len(cells(axes[0], 3)[1]) == len(NASTY)
    for number, ax in enumerate(axes):
        assert Path(save_figure(ax, tmp_path / f"{number}.{file_format}")).stat().st_size > 1000
    assert not caplog.records, "matplotlib's font manager complains in the log"


def test_text_stays_text(tmp_path: Path) -> None:
    ax = plot_lens(make_lens())
    svg = Path(save_figure(ax, tmp_path / "a.svg")).read_text()
    assert "<text" in svg and "·London" in svg
    assert Path(save_figure(ax, tmp_path / "b.svg")).read_text() == svg, "the same figure gives the same bytes"
    assert b"/Subtype /CIDFontType2" in Path(save_figure(ax, tmp_path / "a.pdf")).read_bytes() or (
        b"/FontFile2" in (tmp_path / "a.pdf").read_bytes()
    )


# -- files -------------------------------------------------------------------------------------


def test_files_are_whole_or_not_there(tmp_path: Path, monkeypatch: Any) -> None:
    ax = plot_lens(make_lens())
    path = tmp_path / "new" / "folder" / "lens.PNG"
    assert save_figure(ax, path) == str(path) and path.read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="Can't write the figure"):
        save_figure(ax, tmp_path / "file" / "lens.png")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ArtifactError, match="No space left on device"):
        save_figure(ax, path)
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == ["lens.PNG"]


def test_what_is_no_figure_and_no_path(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    lens, axes = make_lens(), Figure().subplots(1, 2)
    given: list[tuple[Any, Any, str]] = [
        (lens, "z.png", "A figure is saved, or the Axes that a plot function returned, not a LogitLensResult: "
         "save_figure(plot_lens(lens), 'z.png')."),
        (axes, "z.png", "A figure is saved, or the Axes that a plot function returned, not a ndarray: save_figure(axes[0], 'z.png')."),
        (axes[0], 5, "5 is no path: write a string or a Path, such as 'lens.png'."),
        (axes[0], b"z.png", "b'z.png' is no path: write a string or a Path, such as 'lens.png'."),
    ]  # fmt: skip
    for figure, path, message in given:
        with pytest.raises(InputError) as error:
            save_figure(figure, path)
        assert str(error.value) == message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_dir": 5}, "5 is no path: write a string or a Path, such as 'figures'."),
        ({"per_prompt": "yes"}, "per_prompt='yes': write True or False, or leave it out."),
        ({"show": 1}, "show=1: write True or False, or leave it out."),
        ({"by": 3}, "by=3: name one of the prompts' metadata, by='category'."),
        ({"formats": 5}, "formats=5: name one or several of png, svg, pdf, html."),
    ],
)
def test_bad_input_to_plot(options: dict[str, Any], message: str) -> None:
    for call in (lambda: Plot(**options).check(), lambda: draw_results(results_of(make_lens()), **options)):
        with pytest.raises(InputError) as error:
            call()
        assert str(error.value) == message
    with pytest.raises(InputError, match=r"not a LogitLensResult: draw_results\(\{'name': result\}\)"):
        draw_results(make_lens())  # type: ignore[arg-type]


def test_a_png_never_has_too_many_pixels() -> None:
    figure = Figure(figsize=(200, 1))
    figure.subplots()
    width, height = (int.from_bytes(figure_bytes(figure)[at : at + 4], "big") for at in (16, 20))
    assert width <= MOST_PIXELS + 20 and 0 < height < 200


def test_formats(tmp_path: Path) -> None:
    ax = plot_lens(make_lens())
    with pytest.raises(InputError, match="Unknown format '.pgn'. Did you mean 'png'"):
        save_figure(ax, tmp_path / "a.pgn")
    with pytest.raises(InputError, match=r"can't be saved as '.HTML': lens_page\(lens, '.*a.HTML'\) writes a page"):
        save_figure(ax, tmp_path / "a.HTML")
    with pytest.raises(InputError, match="Unknown format 'gif'. Known: png, svg, pdf, html"):
        Plot(formats="gif").check()
    with pytest.raises(InputError, match="has no ending"):
        save_figure(ax, tmp_path / "a")
    with pytest.raises(InputError, match="Unknown format 'pfd'. Did you mean 'pdf'"):
        Plot(formats=("png", "pfd")).check()
    with pytest.raises(InputError, match="formats is empty"):
        Plot(formats=()).check()
    assert not list(tmp_path.iterdir())


# -- the step ----------------------------------------------------------------------------------


def results_of(lens: LogitLensResult) -> Results:
    results = Results()
    results[keys.LOGIT_LENS] = lens
    return results


def test_plot_writes_what_it_says(tmp_path: Path) -> None:
    results = Plot(output_dir=tmp_path, formats=("png", ".svg"))(results_of(make_lens()))
    assert results[keys.PLOTS] == [f"{tmp_path}/logit_lens.png", f"{tmp_path}/logit_lens.svg"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["logit_lens.png", "logit_lens.svg"]
    assert repr(Plot("out", formats=("pdf",))) == "Plot('out', formats=('pdf',))"


def test_several_prompts_and_a_set(tmp_path: Path) -> None:
    def names(prompts: int, per_prompt: bool | None = None) -> list[str]:
        lens = make_lens(prompts=prompts, positions=2, layers=2)
        return [Path(p).name for p in draw_results(results_of(lens), tmp_path, per_prompt=per_prompt)]

    assert names(2) == ["logit_lens_0.png", "logit_lens_1.png"]
    assert names(9) == ["logit_lens_overview.png"]
    assert names(11, True)[-2:] == ["logit_lens_09.png", "logit_lens_10.png"]
    assert names(1, False) == ["logit_lens_overview.png"]


def resident_bytes() -> int:
    """What the process holds of the machine's memory; 0 where it can't be asked."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def test_nothing_is_left_open(tmp_path: Path) -> None:
    plt.figure()  # the reader's own
    before = plt.get_fignums()
    results = results_of(make_lens(layers=2, positions=2))
    memory = []
    for number in range(100):
        Plot(output_dir=tmp_path)(results)
        if number % 40 == 19:  # first when every cache is full
            gc.collect()
            memory.append((sum(type(thing) is Figure for thing in gc.get_objects()), resident_bytes()))
    assert plt.get_fignums() == before and matplotlib.get_backend().lower() == "agg"
    figures, resident = zip(*memory, strict=True)
    assert len(set(figures)) == 1, "figures are kept"
    assert resident[-1] - resident[0] < 8e6, "100 kB a figure would be seen"


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="are there: 'score'. Can be drawn: a LogitLensResult"):
        Plot(output_dir=tmp_path)(Results({"score": 1}))
    with pytest.raises(InputError, match="are there: none"):
        Plot(output_dir=tmp_path)(Results())


def test_what_has_no_page_is_said(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    both = Results({keys.LOGIT_LENS: make_lens(), keys.GENERATION_LENS: make_generation(prompts=1)})
    alone = Results({keys.GENERATION_LENS: make_generation(prompts=1)})
    none = "Only a logit lens has a page (formats='html'): there is none of 'generation_lens'. "
    for results, formats, rest, written in (
        (both, ("png", "html"), "Figures are drawn.", 4),
        (alone, ("png", "html"), "Figures are drawn.", 2),
        (alone, "html", "Nothing is drawn of it: give formats='png', 'svg' or 'pdf'.", 0),
    ):
        with pytest.warns(UserWarning) as caught:
            Plot(tmp_path, formats=formats)(results)
        assert [str(warning.message) for warning in caught] == [none + rest]
        assert len(results[keys.PLOTS]) == written
    Plot(tmp_path, formats="html")(results_of(make_lens()))
    Plot(tmp_path)(alone)
    assert not recwarn.list


def test_nowhere_to_put_figures() -> None:
    results = results_of(make_lens())
    with pytest.warns(UserWarning, match="nowhere to put its figures"):
        assert Plot()(results)[keys.PLOTS] == []
    assert Plot(show=False)(results)[keys.PLOTS] == []


def test_a_notebook_shows_each_figure_once(tmp_path: Path, monkeypatch: Any) -> None:
    import IPython
    import IPython.display

    shown: list[Any] = []
    monkeypatch.setattr(IPython, "get_ipython", lambda: type("Shell", (), {"kernel": object()})())
    monkeypatch.setattr(IPython.display, "display", shown.append)
    Plot()(results_of(make_lens(prompts=2)))
    assert [type(image).__name__ for image in shown] == ["Image", "Image"] and not plt.get_fignums()
    Plot(output_dir=tmp_path, show=False)(results_of(make_lens()))
    assert len(shown) == 2


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": 3}, "Prompt 3 does not exist: there are 1"),
        ({"prompt": "a"}, "A prompt is given by its index, not by 'a'"),
        ({"value": "kl"}, r"'kl' was not read.*LogitLens\(model, stats=\('kl',\)\)"),
        ({"value": "entrpy"}, "Did you mean 'entropy'"),
        ({"layers": [9]}, "Layer 9 is outside the model, which has 4 layers: use 0 to 3"),
        ({"layers": "20-29"}, "Layer 20 is outside the model, which has 4 layers"),
        ({"layers": 5.5}, "layers=5.5 is neither 'all' nor a layer nor a list of layers"),
        ({"layers": "L0.resid_pre"}, "'L0.resid_pre' was not read"),
        ({"layers": []}, r"layers=\[\] names no layer"),
        ({"positions": [5]}, "Position 5 of prompt 0 was not read: it has 5 tokens"),
        ({"positions": [True]}, "A position is given by its index"),
        ({"positions": []}, "no positions to draw"),
        ({"positions": slice(9, 12)}, "no positions to draw"),
        ({"max_columns": 0}, "max_columns"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    before = plt.get_fignums()
    with pytest.raises(InputError, match=message):
        plot_lens(make_lens(), **options)
    assert plt.get_fignums() == before


def test_bad_input_to_the_others() -> None:
    with pytest.raises(InputError, match="LogitLensResult is needed, not Results"):
        plot_lens(Results())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="Did you mean ' London'"):
        plot_trajectories(make_lens(k=14), tokens=["London"])
    with pytest.raises(InputError, match="tokens is empty"):
        plot_trajectories(make_lens(), tokens=[])
    with pytest.raises(InputError, match="'rank' was not read"):
        plot_overview(make_lens(), value="rank")


# -- cost --------------------------------------------------------------------------------------


def test_importing_plots_imports_no_matplotlib() -> None:
    code = "import murano.plotting, murano.steps.plot, sys; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_matplotlib_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from murano.errors import MissingExtraError\n"
        "from murano.steps.plot import Plot\n"
        "import murano.plotting\n"
        "for use in (lambda: murano.plotting.plot_lens, lambda: Plot().check()):\n"
        "    try: use()\n"
        "    except MissingExtraError as error: assert 'murano-interp[plot]' in str(error)\n"
        "    else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_large_heatmap_is_quick(tmp_path: Path) -> None:
    lens = make_lens(layers=30, positions=128)
    started = time.process_time()
    save_figure(plot_lens(lens), tmp_path / "a.png")
    assert time.process_time() - started < 6, "1.5 s were measured on a busy machine"
