"""Metrics of an answer through depth: pure functions of a lens, each giving a :class:`~murano.artifacts.metric_table.MetricTable`.

When does the answer appear, how sure is the model before, does it come gradually or at a snap. Where several answers are accepted they
count as one: their probabilities are added, the best of their ranks is taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from murano.address import Address
from murano.artifacts.logit_lens import LogitLensResult
from murano.artifacts.metric_table import MetricTable
from murano.errors import InputError, nearest


def token_prob(lens: LogitLensResult, of: str = "target", position: int = -1) -> MetricTable:
    """The probability of each prompt's target (or foil) at each layer.

    Args:
        lens: what was read.
        of: ``"target"`` or ``"foil"``.
        position: index of a token in each prompt; -1 is its last one.

    Raises:
        InputError: no prompt carries a target, or it was not read at this position.
    """
    log_probs, left_out = _log_probs(lens, of, position)
    how = f"probability of the {of}, the accepted ones added{_position(position)}"
    return _by_layer(lens, "token_prob", log_probs.exp(), "probability", "higher", how, left_out)


def match(lens: LogitLensResult, position: int = -1) -> MetricTable:
    """Whether each layer's first choice is the prompt's target: 1 or 0.

    A target that ties with another token for the first place counts as first.

    Args:
        lens: what was read.
        position: index of a token in each prompt; -1 is its last one.

    Raises:
        InputError: no prompt carries a target.
    """
    ranks, left_out = _ranks(lens, "target", position)
    values = (ranks == 0).float().masked_fill(ranks.isnan(), torch.nan)
    return _by_layer(
        lens, "match", values, "share", "higher", f"1 where the target ranks first{_position(position)}", left_out
    )


def rank(lens: LogitLensResult, of: str = "target", position: int = -1) -> MetricTable:
    """How many tokens each layer finds more probable than the prompt's target (or foil): 0 when it is the first.

    Args:
        lens: what was read.
        of: ``"target"`` or ``"foil"``.
        position: index of a token in each prompt; -1 is its last one.

    Raises:
        InputError: no prompt carries a target.
    """
    ranks, left_out = _ranks(lens, of, position)
    how = f"tokens more probable than the {of}, the best of the accepted ones{_position(position)}"
    return _by_layer(lens, "rank", ranks, "rank", "lower", how, left_out)


def logit_diff(lens: LogitLensResult, position: int = -1) -> MetricTable:
    """The target's logit less the foil's at each layer, which is the difference of their log-probabilities.

    Args:
        lens: what was read.
        position: index of a token in each prompt; -1 is its last one.

    Raises:
        InputError: no prompt carries a target, or none a foil.
    """
    targets, left_out = _log_probs(lens, "target", position)
    foils, no_foil = _log_probs(lens, "foil", position)
    how = f"log p(target) - log p(foil), the accepted ones of each added{_position(position)}"
    return _by_layer(lens, "logit_diff", targets - foils, "nats", "higher", how, {**no_foil, **left_out})


def prediction_depth(lens: LogitLensResult, of: str = "prediction", position: int = -1) -> MetricTable:
    """The first layer from which the first choice stays, to the end, what the last layer predicts (Baldock et al. 2021, for layers of a
    language model as in Belrose et al. 2023).

    Args:
        lens: what was read, its last layer included.
        of: ``"prediction"`` for the model's own, ``"target"`` for the prompt's target: NaN where the model does not end with it.
        position: index of a token in each prompt; -1 is its last one.

    Raises:
        InputError: the last layer was not read, or ``"target"`` and no prompt carries one.
    """
    _check_of(of, ("prediction", "target"))
    order = _in_depth(lens, "prediction_depth")
    if of == "target":
        ranks, left_out = _ranks(lens, "target", position)
        right = (ranks == 0)[:, order]
    else:
        prompts, columns, left_out = _columns(lens, position)
        first = lens.predicted_tokens[:, prompts, columns][order].T
        right = (first == first[:, -1:]) & (first >= 0) & ~lens.max_probs[:, prompts, columns][order].T.isnan()
        right[[int(prompt) for prompt in left_out]] = False
    depth = _first_that_stays(right, _layers(lens, order))
    why = "the last layer's first choice is not the target" if of == "target" else "its logits are not finite"
    missing = {str(i): why for i in depth.isnan().nonzero().flatten().tolist()}
    how = f"first layer from which the first choice stays the {of}{_position(position)}"
    return _of_prompts(lens, "prediction_depth", {"depth": depth}, "layer", "lower", how, {**missing, **left_out})


def commitment(lens: LogitLensResult, threshold: float = 0.5, position: int = -1) -> MetricTable:
    """How the target's probability rises: when it passes a threshold, and whether gradually or at a snap.

    Columns: ``depth``, the first layer from which the probability stays above the threshold (NaN if it ends below); ``area``, the mean
    of the probability over depth, by the trapezoid rule on depth from 0 to 1; ``jump``, the largest rise from one layer to the next;
    ``jump_layer``, the layer that it rises to; ``jump_share``, that rise as a share of the rise from the lowest probability before
    to the highest after: 1 is a snap, 1 / (number of layers - 1) an even climb; NaN where it never rises.

    Args:
        lens: what was read, of two layers at least.
        threshold: a probability.
        position: index of a token in each prompt; -1 is its last one.

    Raises:
        InputError: no prompt carries a target, one layer only, or a threshold outside 0 to 1.
    """
    _check_share("threshold", threshold)
    order = _in_depth(lens, "commitment")
    log_probs, left_out = _log_probs(lens, "target", position)
    p = log_probs.exp()[:, order]
    layers = _layers(lens, order)
    steps = p.diff(dim=1)
    jump, at = steps.max(dim=1)
    before, after = p.cummin(dim=1).values[:, :-1], p.flip(1).cummax(dim=1).values.flip(1)[:, 1:]
    rise = (after - before).gather(1, at.unsqueeze(1)).squeeze(1)
    nobody = p.isnan().any(dim=1)
    numbers = {
        "depth": _first_that_stays(p > threshold, layers),
        "area": torch.trapezoid(p, torch.linspace(0, 1, p.shape[1]), dim=1),
        "jump": jump,
        "jump_layer": layers[at + 1],
        "jump_share": torch.where(jump > 0, jump / rise, torch.nan),
    }
    numbers = {name: value.masked_fill(nobody, torch.nan) for name, value in numbers.items()}
    how = f"the target's probability through depth, threshold {threshold:g}{_position(position)}"
    return _of_prompts(lens, "commitment", numbers, "layer, probability, probability, layer, share", "", how, left_out)


def decided(table: MetricTable, n_layers: int | None = None) -> Float[Tensor, " layer"]:
    """The share of prompts that are decided at each layer or before, from a table of depths.

    Args:
        table: as :func:`prediction_depth` or :func:`commitment` gives it.
        n_layers: how many layers the model has; the table's model says it.
    """
    depth = table["depth"]
    n = n_layers if n_layers is not None else int(table.model["n_layers"])
    return torch.stack([(depth <= layer).float().mean() for layer in range(n)])


#: Every metric by name, as documents call them.
METRICS: dict[str, Callable[..., MetricTable]] = {
    "token_prob": token_prob,
    "match": match,
    "logit_diff": logit_diff,
    "rank": rank,
    "prediction_depth": prediction_depth,
    "commitment": commitment,
}


def _answers(lens: LogitLensResult, of: str, position: int) -> tuple[Tensor, Tensor, dict[str, str]]:
    """Log-probabilities and ranks ``[layer, prompt, answer]``, and why prompts have none."""
    _check_of(of, ("target", "foil"))
    log_probs, ranks = getattr(lens, f"{of}_log_probs"), getattr(lens, f"{of}_ranks")
    if log_probs is None:
        kept = f"; or read the residuals that were kept again: murano.reread(lens, model, {of}s=[…])"
        raise InputError(
            f"No {of} was read: give one to each prompt, LoadPrompts(prompts, {of}s=[…]), before LogitLens reads them"
            f"{kept if lens.residuals is not None else ''}."
        )
    if lens.target_mode == "sequence" and position != -1:
        raise InputError(
            "With target_mode='sequence' a target is read at each prompt's last position only: position=-1."
        )
    prompts, columns, left_out = _columns(lens, position)
    log_probs, ranks = log_probs.clone(), ranks.clone()
    chosen_p, chosen_r = log_probs[:, prompts, columns], ranks[:, prompts, columns]
    for prompt, texts in enumerate(getattr(lens, f"{of}_texts")):
        if not texts:
            left_out.setdefault(str(prompt), f"it has no {of}")
    gone = [int(prompt) for prompt in left_out]
    chosen_p[:, gone], chosen_r[:, gone] = torch.nan, -1
    for prompt in chosen_p.isnan().all(-1).all(0).nonzero().flatten().tolist():
        left_out.setdefault(str(prompt), "its logits are not finite")
    return chosen_p, chosen_r, left_out


def _columns(lens: LogitLensResult, position: int) -> tuple[Tensor, Tensor, dict[str, str]]:
    """The column of a position in each prompt, and why a prompt has none."""
    columns, left_out = [], {}
    for prompt in range(lens.n_prompts):
        try:
            columns.append(lens.column(prompt, position))
        except InputError as error:
            columns.append(0)
            left_out[str(prompt)] = str(error)
    if len(left_out) == lens.n_prompts:
        raise InputError(next(iter(left_out.values()), "There are no prompts."))
    return torch.arange(lens.n_prompts), torch.tensor(columns), left_out


def _check_of(of: Any, allowed: tuple[str, ...]) -> None:
    if of not in allowed:
        raise InputError(f"of={of!r} is unknown.{nearest(of, allowed)} Use {' or '.join(map(repr, allowed))}.")


def _check_share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise InputError(f"{name}={value!r} must be a number between 0 and 1, such as 0.5.")


def check_options(metric: str, options: Mapping[str, Any]) -> None:
    """Refuse options of a metric that can't be right, before a lens is read.

    Args:
        metric: its name in :data:`METRICS`.
        options: what is passed to it.

    Raises:
        InputError: an unknown option, or a value that it can't have.
    """
    known = list(inspect.signature(METRICS[metric]).parameters)[1:]
    for name, value in options.items():
        if name not in known:
            raise InputError(f"{metric} takes no {name!r}.{nearest(name, known)} It takes: {', '.join(known)}.")
        if name == "of":
            _check_of(value, ("prediction", "target") if metric == "prediction_depth" else ("target", "foil"))
        if name == "threshold":
            _check_share(name, value)
        if name == "position" and (isinstance(value, bool) or not hasattr(value, "__index__")):
            raise InputError(f"position={value!r} must be the index of a token in its prompt; -1 is the last one.")


def needs(metric: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """The answers that prompts must carry for a metric: ``"target"``, ``"foil"``, both or none.

    Args:
        metric: its name in :data:`METRICS`.
        options: what is passed to it.
    """
    if metric == "logit_diff":
        return ("target", "foil")
    parameters = inspect.signature(METRICS[metric]).parameters
    of = options.get("of", parameters["of"].default if "of" in parameters else "target")
    return () if of == "prediction" else (of,)


def _log_probs(lens: LogitLensResult, of: str, position: int) -> tuple[Float[Tensor, "prompt layer"], dict[str, str]]:
    log_probs, _, left_out = _answers(lens, of, position)
    nobody = log_probs.isnan().all(dim=-1)
    added = torch.where(log_probs.isnan(), -torch.inf, log_probs).logsumexp(-1).masked_fill(nobody, torch.nan)
    return added.T, left_out


def _ranks(lens: LogitLensResult, of: str, position: int) -> tuple[Float[Tensor, "prompt layer"], dict[str, str]]:
    _, ranks, left_out = _answers(lens, of, position)
    best = torch.where(ranks < 0, torch.inf, ranks.float()).amin(dim=-1)
    return torch.where(best.isinf(), torch.nan, best).T, left_out


def check_layers(metric: str, addresses: Sequence[Address], n_layers: int) -> None:
    """Refuse layers of which a metric can't be had.

    Args:
        metric: its name in :data:`METRICS`.
        addresses: what is read.
        n_layers: how many layers the model has.

    Raises:
        InputError: a depth without the last layer, or a rise over one layer.
    """
    if metric == "prediction_depth" and not any(_depth(a, n_layers) == n_layers - 1 for a in addresses):
        raise InputError(
            "The last layer is not read, so it is not known what the model predicts: LogitLens(model, layers='all')."
        )
    if metric == "commitment" and len(addresses) < 2:
        raise InputError("A rise needs two layers: read more of them, LogitLens(model, layers='all').")


def check_position(position: int, positions: Sequence[int]) -> None:
    """Refuse a position that is not among those that are read, as far as that is known before prompts have lengths.

    Raises:
        InputError: naming those that are read.
    """
    if position not in positions and all((p < 0) == (position < 0) for p in positions):
        read = ", ".join(map(str, positions))
        raise InputError(
            f"It looks at position {position}, and only {read} {'is' if len(positions) == 1 else 'are'} read: add it, "
            f"LogitLens(model, positions={[*positions, position]}), or ask for position={positions[-1]}."
        )


def _in_depth(lens: LogitLensResult, metric: str) -> list[int]:
    """Indices on the layer axis, ordered by depth; what is read after the last block counts as that block."""
    n_layers = int(lens.model.get("n_layers", len(lens.addresses)))
    check_layers(metric, lens.addresses, n_layers)
    return sorted(range(len(lens.addresses)), key=lambda i: _depth(lens.addresses[i], n_layers))


def _depth(address: Any, n_layers: int) -> float:
    if address.layer is None:
        return -1.0 if address.component == "embeddings" else n_layers - 1
    return float(address.layer) - {"resid_pre": 1.0, "resid_mid": 0.5}.get(address.component, 0.0)


def _layers(lens: LogitLensResult, order: list[int]) -> Float[Tensor, " layer"]:
    n_layers = int(lens.model.get("n_layers", len(lens.addresses)))
    return torch.tensor([_depth(lens.addresses[i], n_layers) for i in order])


def _first_that_stays(right: Bool[Tensor, "prompt layer"], layers: Float[Tensor, " layer"]) -> Float[Tensor, " prompt"]:
    """The first layer from which a row is true to its end; NaN where it ends false."""
    run: Int[Tensor, " prompt"] = right.flip(1).long().cumprod(dim=1).sum(dim=1)
    first = layers[(right.shape[1] - run).clamp(max=right.shape[1] - 1)]
    return first.masked_fill(run == 0, torch.nan)


def _position(position: int) -> str:
    return ", at the last position" if position == -1 else f", at position {position}"


def _by_layer(
    lens: LogitLensResult,
    name: str,
    values: Float[Tensor, "prompt layer"],
    unit: str,
    direction: str,
    how: str,
    left_out: dict[str, str],
) -> MetricTable:
    return MetricTable(
        name=name,
        values=values.float().contiguous(),
        columns=tuple(map(str, lens.addresses)),
        addresses=lens.addresses,
        unit=unit,
        direction=direction,
        how=how,
        left_out=left_out,
        prompts=lens.prompts,
        model=lens.model,
    )


def _of_prompts(
    lens: LogitLensResult,
    name: str,
    numbers: dict[str, Float[Tensor, " prompt"]],
    unit: str,
    direction: str,
    how: str,
    left_out: dict[str, str],
) -> MetricTable:
    return MetricTable(
        name=name,
        values=torch.stack(list(numbers.values()), dim=1).float(),
        columns=tuple(numbers),
        unit=unit,
        direction=direction,
        how=how,
        left_out=left_out,
        prompts=lens.prompts,
        model=lens.model,
    )
