"""A lens as a table that pandas, R or a spreadsheet reads."""

from __future__ import annotations

from typing import Any

import torch

from murano.artifacts.logit_lens import LogitLensResult
from murano.errors import MissingExtraError


def lens_frame(lens: LogitLensResult) -> Any:
    """All cells of a lens as a pandas ``DataFrame`` in long form, a row per layer, prompt and position.

    Columns: ``prompt``, ``text``, the prompts' metadata, ``address``, ``layer`` (missing where an address has none), ``position`` (in its
    prompt), ``input_id``, ``input_token``, ``predicted_id``, ``predicted_token``, ``prob``, ``entropy`` (nats), each statistic read,
    and for the first target and foil of the prompt ``target``, ``target_prob``, ``target_rank``, ``foil``, ``foil_prob``, ``foil_rank``.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise MissingExtraError("A data frame", "data") from None
    layer, prompt, position = lens.attention_mask.expand(len(lens.addresses), -1, -1).nonzero(as_tuple=True)
    layers, prompts = layer.tolist(), prompt.tolist()
    columns: dict[str, Any] = {"prompt": prompts}
    if lens.prompts is not None:
        texts = lens.prompts.texts
        columns["text"] = [texts[i] for i in prompts]
        for name in dict.fromkeys(name for p in lens.prompts for name in p.metadata):
            values = [p.metadata.get(name) for p in lens.prompts]
            columns[name] = [values[i] for i in prompts]
    columns["address"] = [str(lens.addresses[i]) for i in layers]
    columns["layer"] = pandas.array([lens.addresses[i].layer for i in layers], dtype="Int64")
    columns["position"] = lens.position_index[prompt, position].tolist()
    for name, ids in (
        ("input", lens.input_ids[prompt, position]),
        ("predicted", lens.top_ids[layer, prompt, position, 0]),
    ):
        columns[f"{name}_id"] = ids.tolist()
        columns[f"{name}_token"] = [lens.words[i] for i in columns[f"{name}_id"]]
    columns["prob"] = lens.max_probs[layer, prompt, position].numpy()
    columns["entropy"] = lens.entropy[layer, prompt, position].numpy()
    for name, stat in lens.stats.items():
        columns[name] = stat[layer, prompt, position].numpy()
    for kind in ("target", "foil"):
        log_probs, ranks = getattr(lens, f"{kind}_log_probs"), getattr(lens, f"{kind}_ranks")
        if log_probs is None:
            continue
        answers = [t[0] if t else None for t in getattr(lens, f"{kind}_texts")]
        columns[kind] = [answers[i] for i in prompts]
        columns[f"{kind}_prob"] = log_probs[layer, prompt, position, 0].exp().numpy()
        rank = ranks[layer, prompt, position, 0]
        columns[f"{kind}_rank"] = pandas.array(
            torch.where(rank < 0, torch.nan, rank.double()).numpy(), dtype="Float64"
        ).astype("Int64")
    return pandas.DataFrame(columns)
