"""Metrics of a lens made by hand, so that every value is known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from murano import (
    Address,
    ArtifactError,
    InputError,
    LogitLensResult,
    MetricTable,
    Pipeline,
    Prompt,
    PromptBatch,
    load_artifact,
    metrics,
    save_artifact,
)
from murano.artifacts.words import TokenWords
from murano.results import Results
from murano.steps import Commitment, LoadPrompts, LogitDiff, LogitLens, Match, PredictionDepth, Rank, TokenProb

NAN = math.nan
WORDS = TokenWords({0: "a", 1: "b", 2: "c", 3: "d"})


def lens_of(
    target_probs: Any, ranks: Any, top: Any, *, foil_probs: Any = None, layers: Any = None, **more: Any
) -> LogitLensResult:
    """A lens of one position: ``[prompt][layer]`` probabilities, ranks and first choices."""
    probs = torch.tensor(target_probs, dtype=torch.float32)
    probs = probs.unsqueeze(-1) if probs.ndim == 2 else probs  # prompt layer target
    n_prompts, n_layers, n_targets = probs.shape
    rank = torch.tensor(ranks, dtype=torch.int32).view(n_prompts, n_layers, n_targets)
    first = torch.tensor(top).view(n_prompts, n_layers)
    foils = None if foil_probs is None else torch.tensor(foil_probs).view(n_prompts, n_layers, 1, 1).transpose(0, 1)
    categories = ["even" if i % 2 == 0 else "odd" for i in range(n_prompts)]
    fields: dict[str, Any] = {
        "addresses": tuple(Address.parse(a) for a in (layers or range(n_layers))),
        "top_ids": first.T.reshape(n_layers, n_prompts, 1, 1),
        "top_probs": torch.full((n_layers, n_prompts, 1, 1), 0.5),
        "entropy": torch.ones(n_layers, n_prompts, 1),
        "log_normalizer": torch.ones(n_layers, n_prompts, 1),
        "input_ids": torch.zeros(n_prompts, 1, dtype=torch.int64),
        "attention_mask": (first[:, :1] >= 0),
        "position_index": torch.zeros(n_prompts, 1, dtype=torch.int64),
        "words": WORDS,
        "model": {"n_layers": n_layers, "model_id": "made by hand"},
        "prompts": PromptBatch(
            [Prompt(text=f"p{i}", targets=("a",), metadata={"kind": c}) for i, c in enumerate(categories)]
        ),
        "target_texts": tuple(("a",) * int((~probs[i, 0].isnan()).sum()) for i in range(n_prompts)),
        "target_ids": torch.zeros(n_prompts, n_targets, dtype=torch.int64),
        "target_log_probs": probs.log().transpose(0, 1).unsqueeze(2),
        "target_ranks": rank.transpose(0, 1).unsqueeze(2),
    }
    if foils is not None:
        fields |= {"foil_texts": (("b",),) * n_prompts, "foil_log_probs": foils.log(), "foil_ids": fields["target_ids"]}
        fields["foil_ranks"] = torch.ones(n_layers, n_prompts, 1, 1, dtype=torch.int32)
    return LogitLensResult(**fields | more)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), atol=1e-6, rtol=1e-6, equal_nan=True)


RISE = [[0.0, 0.1, 0.2, 0.9, 0.8], [0.3, 0.2, 0.1, 0.4, 0.4], [NAN] * 5]
RANKS = [[9, 3, 1, 0, 0], [0, 1, 2, 0, 1], [-1] * 5]
TOP = [[1, 2, 3, 0, 0], [0, 1, 1, 0, 1], [2, 2, 3, 2, 2]]


def test_token_prob_match_and_rank() -> None:
    lens = lens_of(RISE, RANKS, TOP)
    close(metrics.token_prob(lens).values, RISE)
    close(metrics.match(lens).values, [[0, 0, 0, 1, 1], [1, 0, 0, 1, 0], [NAN] * 5])
    close(metrics.rank(lens).values, [[9, 3, 1, 0, 0], [0, 1, 2, 0, 1], [NAN] * 5])
    table = metrics.token_prob(lens)
    assert table.left_out == {"2": "it has no target"}
    assert (table.unit, table.direction) == ("probability", "higher")
    close(table[-1], [0.8, 0.4, NAN])
    close(table["L3.resid_post"], [0.9, 0.4, NAN])
    with pytest.raises(InputError, match="token_prob has no column 'L7.resid_post'|outside"):
        table["L7.resid_post"]


def test_several_answers_count_as_one() -> None:
    lens = lens_of(
        [[[0.2, 0.3], [0.1, 0.6]], [[0.2, NAN], [0.3, NAN]]], [[[1, 0], [2, 0]], [[4, -1], [0, -1]]], [[1, 1], [1, 0]]
    )
    close(metrics.token_prob(lens).values, [[0.5, 0.7], [0.2, 0.3]])
    close(metrics.rank(lens).values, [[0, 0], [4, 0]])
    close(metrics.match(lens).values, [[1, 1], [0, 1]])


def test_logit_diff() -> None:
    lens = lens_of([[0.2, 0.8]], [[1, 0]], [[1, 0]], foil_probs=[[0.4, 0.1]])
    close(metrics.logit_diff(lens).values, [[math.log(0.5), math.log(8)]])
    close(metrics.token_prob(lens, of="foil").values, [[0.4, 0.1]])


def test_prediction_depth() -> None:
    lens = lens_of(RISE, RANKS, TOP)
    close(metrics.prediction_depth(lens).values, [[3], [4], [3]])
    target = metrics.prediction_depth(lens, of="target")
    close(target.values, [[3], [NAN], [NAN]])
    assert target.left_out == {"1": "the last layer's first choice is not the target", "2": "it has no target"}
    close(metrics.decided(target), [0, 0, 0, 1 / 3, 1 / 3])
    settled = lens_of([[0.9, 0.9, 0.9]], [[0, 0, 0]], [[0, 0, 0]])
    close(metrics.prediction_depth(settled).values, [[0]])
    missing = lens_of([[0.9, 0.9, 0.9]], [[0, 0, 0]], [[-1, -1, -1]])
    close(metrics.prediction_depth(missing).values, [[NAN]])


def test_logits_that_are_not_finite_are_no_match() -> None:
    lens = lens_of(
        *([[NAN] * 3, [0.1, 0.2, 0.3]], [[-1] * 3, [1, 1, 0]], [[0] * 3, [1, 1, 0]]),
        target_texts=(("a",), ("a",)),
        top_probs=torch.tensor([[[[NAN]], [[0.5]]]] * 3),
    )
    for table in (metrics.match(lens), metrics.rank(lens), metrics.token_prob(lens), metrics.prediction_depth(lens)):
        assert table.values[0].isnan().all()
        assert table.left_out == {"0": "its logits are not finite"}
        assert table.values[1].isfinite().all()


def test_a_position_is_that_of_a_token_in_its_prompt() -> None:
    """Prompts of different lengths stand right-aligned, and positions may be read in any order."""
    n = torch.tensor
    lens = lens_of(
        *([[0.1, 0.2], [0.3, 0.4]], [[1, 1], [1, 0]], [[1, 1], [1, 0]]),
        position_index=n([[2, 0], [-1, 0]]),
        attention_mask=n([[True, True], [False, True]]),
        input_ids=n([[1, 0], [-1, 0]]),
        lengths=n([3, 1]),
        target_log_probs=n([[[0.5, 0.1], [NAN, 0.3]], [[0.6, 0.2], [NAN, 0.4]]]).log().unsqueeze(-1),
        target_ranks=torch.ones(2, 2, 2, 1, dtype=torch.int32),
        top_ids=torch.ones(2, 2, 2, 1, dtype=torch.int64),
        top_probs=torch.full((2, 2, 2, 1), 0.5),
    )
    close(metrics.token_prob(lens).values, [[0.5, 0.6], [0.3, 0.4]])  # the last token, wherever it stands
    close(metrics.token_prob(lens, position=0).values, [[0.1, 0.2], [0.3, 0.4]])
    third = metrics.token_prob(lens, position=2)
    close(third.values, [[0.5, 0.6], [NAN, NAN]])
    assert third.left_out == {"1": "Position 2 of prompt 1 was not read: it has 1 tokens; read: 0."}
    assert lens.at(0, 2).answers[0][1].tolist() == pytest.approx([0.5, 0.6])
    with pytest.raises(InputError, match="Position 1 of prompt 0 was not read: it has 3 tokens; read: 0, 2"):
        lens.at(0, 1)
    with pytest.raises(InputError, match="A prompt is given by its index, not by 'One'"):
        lens.at("One")  # type: ignore[arg-type]


def test_layers_are_taken_in_depth_whatever_their_order() -> None:
    backwards = lens_of([RISE[0][::-1]], [RANKS[0][::-1]], [TOP[0][::-1]], layers=[4, 3, 2, 1, 0])
    close(metrics.prediction_depth(backwards).values, [[3]])
    close(
        metrics.commitment(backwards).values, metrics.commitment(lens_of(RISE[:1], RANKS[:1], TOP[:1])).values.tolist()
    )
    early = lens_of([[0.1, 0.9]], [[1, 0]], [[1, 0]], layers=["embeddings", "L1.resid_post"])
    close(metrics.commitment(early)["depth"], [1])


def test_commitment() -> None:
    table = metrics.commitment(lens_of(RISE, RANKS, TOP))
    assert table.columns == ("depth", "area", "jump", "jump_layer", "jump_share")
    area = (0.0 / 2 + 0.1 + 0.2 + 0.9 + 0.8 / 2) / 4
    close(table.values[0], [3, area, 0.7, 3, 0.7 / 0.9])
    close(table.values[1], [NAN, (0.3 / 2 + 0.2 + 0.1 + 0.4 + 0.4 / 2) / 4, 0.3, 3, 1.0])
    close(table.values[2], [NAN] * 5)
    snap = metrics.commitment(lens_of([[0, 0, 1, 1.0]], [[1, 1, 0, 0]], [[1, 1, 0, 0]]))
    close(snap["jump_share"], [1.0])
    even = metrics.commitment(lens_of([[0, 0.25, 0.5, 0.75, 1.0]], [[1, 1, 0, 0, 0]], [[1, 1, 0, 0, 0]]))
    close(even["jump_share"], [0.25])
    falling = metrics.commitment(lens_of([[0.9, 0.5, 0.1]], [[0, 0, 1]], [[0, 0, 1]]))
    assert falling["jump_share"].isnan().all()
    close(metrics.commitment(lens_of([[0.9, 0.5, 0.6]], [[0, 0, 0]], [[0, 0, 0]]), threshold=0.55)["depth"], [2])


def test_means_groups_and_intervals() -> None:
    probs = [[0.0, 0.1], [1.0, 0.2], [0.5, 0.3], [0.25, NAN]]
    table = metrics.token_prob(lens_of(probs, [[0, 0]] * 4, [[0, 0]] * 4))
    mean = table.mean()
    close(mean.mean, [[1.75 / 4, 0.2]])
    assert mean.n.tolist() == [[4, 3]]
    assert (mean.low <= mean.mean).all()
    assert (mean.mean <= mean.high).all()
    groups = table.mean("kind")
    assert groups.groups == ("even", "odd")
    close(groups.mean, [[0.25, 0.2], [0.625, 0.2]])
    assert torch.equal(table.mean().low, mean.low)  # the same seed draws the same
    many = torch.linspace(0, 1, 400).tolist()
    wide = metrics.token_prob(lens_of([[v, v] for v in many], [[0, 0]] * 400, [[0, 0]] * 400)).mean()
    error = torch.tensor(many).std() / math.sqrt(400)
    assert float(wide.high[0, 0] - wide.low[0, 0]) == pytest.approx(2 * 1.96 * float(error), rel=0.1)
    with pytest.raises(InputError, match="can't be grouped by 'knd'. Did you mean 'kind'"):
        table.mean("knd")
    with pytest.raises(InputError, match="confidence=95 must be a number between 0 and 1, such as 0.95"):
        table.mean(confidence=95)


def test_tables(tmp_path: Path) -> None:
    table = metrics.token_prob(lens_of(RISE, RANKS, TOP))
    frame = table.to_dataframe()
    assert list(frame.columns) == ["prompt", "text", "target", "foil", "kind", "layer", "address", "token_prob"]
    assert len(frame) == 15
    assert frame.token_prob[3] == pytest.approx(0.9)
    file = table.to_csv(tmp_path / "t.csv")
    assert file.read_text().splitlines()[4].startswith("0,p0,a,,even,3,L3.resid_post,0.89999")
    assert repr(table) == "MetricTable(token_prob (probability): 3 prompts × 5 layers, 1 left out)"
    assert "all (n=2)" in repr(table.mean())
    assert "1 left out: it has no target" in repr(table.mean())
    assert len(table) == 3
    assert "(n=1)" in repr(metrics.commitment(lens_of(RISE, RANKS, TOP)).mean())  # of two prompts one has a depth
    with pytest.raises(ArtifactError, match="Can't write"):
        table.to_csv(tmp_path / "no" / "t.csv")
    assert "<th>all (n=2)</th>" in table._repr_html_()
    assert list(table.mean("kind").to_dataframe().columns) == ["kind", "address", "mean", "low", "high", "n"]
    reloaded = load_artifact(save_artifact(tmp_path / "t.pt", table), MetricTable)
    close(reloaded.values, RISE)
    assert (reloaded.columns, reloaded.prompts, reloaded.left_out) == (table.columns, table.prompts, table.left_out)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lens: metrics.token_prob(lens, of="targets"), "of='targets' is unknown"),
        (
            lambda lens: metrics.token_prob(lens, position=3),
            "Position 3 of prompt 0 was not read: it has 1 tokens; read: 0",
        ),
        (
            lambda lens: metrics.logit_diff(lens),
            r"No foil was read: give one to each prompt, LoadPrompts\(prompts, foils=\[…\]\)",
        ),
        (
            lambda lens: metrics.commitment(lens, threshold=1.5),
            "threshold=1.5 must be a number between 0 and 1, such as 0.5",
        ),
        (lambda lens: metrics.prediction_depth(lens, of="foil"), "of='foil' is unknown"),
    ],
)
def test_what_is_refused(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(lens_of(RISE, RANKS, TOP))


def test_a_lens_without_what_is_needed() -> None:
    lens = lens_of([[0.5]], [[0]], [[0]], model={"n_layers": 3})
    with pytest.raises(InputError, match="The last layer is not read"):
        metrics.prediction_depth(lens)
    with pytest.raises(InputError, match="A rise needs two layers"):
        metrics.commitment(lens)
    untargeted = lens_of(RISE, RANKS, TOP, target_log_probs=None)
    with pytest.raises(
        InputError, match=r"No target was read: give one to each prompt, LoadPrompts\(prompts, targets=\[…\]\), before"
    ):
        metrics.token_prob(untargeted)
    with pytest.raises(InputError, match="reread"):
        metrics.token_prob(lens_of(RISE, RANKS, TOP, target_log_probs=None, residuals=torch.zeros(5, 3, 1, 2)))


def test_steps() -> None:
    results = Results({"logit_lens": lens_of(RISE, RANKS, TOP, foil_probs=[[0.1] * 5] * 3)})
    steps = [TokenProb(), Match(), LogitDiff(), Rank(), PredictionDepth(of="target"), Commitment(threshold=0.3)]
    Pipeline(steps).run(results)
    for name in ("token_prob", "match", "logit_diff", "rank", "prediction_depth", "commitment"):
        assert isinstance(results[name], MetricTable)
        assert results[name].name == name
    close(results["commitment"]["depth"], [3, 3, NAN])
    assert repr(steps[-1]) == "Commitment(threshold=0.3)"
    with pytest.raises(InputError, match="commitment takes no 'treshold'. Did you mean 'threshold'"):
        Commitment(treshold=0.3)
    for bad in ({"threshold": 1.5}, {"threshold": "a"}, {"position": "last"}, {"position": 0.5}):
        with pytest.raises(InputError, match="must be"):
            Commitment(**bad)
    with pytest.raises(InputError, match="of='foils' is unknown. Did you mean 'foil'"):
        TokenProb(of="foils")
    Pipeline([TokenProb(), TokenProb(of="foil", key="foil_prob")]).run(results)
    close(results["foil_prob"].values, [[0.1] * 5] * 3)
    close(results["token_prob"].values, RISE)
    assert repr(TokenProb(of="foil", key="foil_prob")) == "TokenProb(key='foil_prob', of='foil')"
    with pytest.raises(Exception, match=r"reads 'logit_lens', which no step before it writes. Add LogitLens"):
        Pipeline([TokenProb()]).validate()


@pytest.mark.parametrize(
    ("lens", "step", "message"),
    [
        ({"layers": [0, 1]}, PredictionDepth(), "PredictionDepth.*The last layer is not read"),
        ({"layers": "last"}, Commitment(), "Commitment.*A rise needs two layers"),
        (
            {"positions": [0, 2]},
            TokenProb(position=1),
            "It looks at position 1, and only 0, 2 are read: add it, .*positions=.0, 2, 1",
        ),
        ({"positions": -2}, Rank(), "It looks at position -1, and only -2 is read.* or ask for position=-2"),
    ],
)
def test_what_a_lens_will_not_have_is_missed_before_it_is_read(
    lens: dict[str, Any], step: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.reading import held

    monkeypatch.setattr(LogitLens, "run", lambda *_: pytest.fail("the lens was read"))
    chain = Pipeline([LoadPrompts(["a b c"], targets=["d"]), LogitLens(held("llama"), **lens), step])
    with pytest.raises(InputError, match=message):
        chain.run()


def test_what_a_lens_may_have_is_not_refused() -> None:
    """A position counted from the other end is known when prompts have lengths; ln_final is the last layer."""
    from support.reading import held

    load = LoadPrompts(["a b c"], targets=[20])
    for options, step in (
        ({"positions": [0, 1, 2, 3, -1], "layers": [0, "ln_final"]}, PredictionDepth(position=2)),
        ({"positions": [-1], "layers": [-1, "embeddings"]}, Commitment()),
    ):
        Pipeline([load, LogitLens(held("llama"), **options), step]).run()
    length = len(held("llama").encode("a b c"))
    found = Pipeline([load, LogitLens(held("llama"), positions=[length - 1]), TokenProb()]).run()["token_prob"]
    assert not found.values.isnan().any()


def test_curves() -> None:
    from murano.plotting.metrics import decided_curves, metric_curves, plot_decided, plot_metric

    lens = lens_of(RISE, RANKS, TOP, foil_probs=[[0.1] * 5] * 3)
    curves = metric_curves(metrics.token_prob(lens))
    assert curves.mean[0].tolist() == pytest.approx([0.15, 0.15, 0.15, 0.65, 0.6])
    assert curves.groups == ["all (n=2)"]
    assert (curves.unit, curves.log, curves.limits) == ("probability of the target", False, (0, 1))
    ranks = metric_curves(metrics.rank(lens))
    assert ranks.mean[0].tolist() == pytest.approx([5.5, 3, 2.5, 1, 1.5])  # counted from 1: the axis is logarithmic
    assert ranks.log
    grouped = metric_curves(metrics.match(lens), by="kind")
    assert grouped.groups == ["even (n=1)", "odd (n=1)"]
    shares = decided_curves(metrics.prediction_depth(lens, of="target"))
    assert shares.mean[0].tolist() == pytest.approx([0, 0, 0, 1 / 3, 1 / 3])
    ax = plot_metric(metrics.rank(lens), by="kind")
    assert ax.get_yscale() == "log"
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["even (n=1)", "odd (n=1)"]  # type: ignore[union-attr]
    assert ax.lines[1].get_ydata().tolist() == [1, 2, 3, 1, 2]  # type: ignore[union-attr]
    assert plot_decided(metrics.commitment(lens)).get_ylabel() == "share of prompts decided"
    with pytest.raises(InputError, match="commitment has depth, area.*plot_decided"):
        plot_metric(metrics.commitment(lens))
    with pytest.raises(InputError, match="Only a table of depths"):
        plot_decided(metrics.match(lens))


def test_plot_draws_tables(tmp_path: Path) -> None:
    from murano.steps import Plot

    lens = lens_of(RISE, RANKS, TOP)
    results = Results({"token_prob": metrics.token_prob(lens), "commitment": metrics.commitment(lens)})
    files = Plot(tmp_path, by="kind")(results)["plots"]
    assert [Path(f).name for f in files] == ["token_prob.png", "commitment.png"]
    assert all(Path(f).stat().st_size > 5000 for f in files)


def test_the_same_prompts_are_drawn_for_every_column() -> None:
    values = torch.rand(12, 1, generator=torch.Generator().manual_seed(0))
    table = MetricTable(name="p", values=values.expand(-1, 3), columns=("a", "b", "c"))
    mean = table.mean()
    assert mean.low[0].tolist() == [mean.low[0, 0]] * 3
    assert mean.high[0].tolist() == [mean.high[0, 0]] * 3
    assert mean.low[0, 0] < mean.high[0, 0]


def test_one_prompt_has_no_interval() -> None:
    table = MetricTable(name="p", values=torch.tensor([[0.25, 0.5]]), columns=("a", "b"), unit="probability")
    mean = table.mean()
    assert mean.mean.tolist() == [[0.25, 0.5]]
    assert mean.low.isnan().all() and mean.high.isnan().all()
    assert repr(mean).splitlines()[0] == "p (probability): value of one prompt"
    assert [line.split() for line in repr(mean).splitlines()[2:]] == [["a", "0.25"], ["b", "0.5"]]
