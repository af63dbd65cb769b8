"""A page to explore a lens in a browser: one file that loads nothing, from the network or otherwise."""

from __future__ import annotations

import base64
import html
import json
import os
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import numpy as np

from murano.artifacts.folder import new_file
from murano.artifacts.logit_lens import LogitLensResult
from murano.errors import ArtifactError
from murano.plotting import labels
from murano.plotting.selection import check_lens, final_layer, ordered_layers, pick_positions, pick_prompts, row_labels
from murano.plotting.values import as_array, statistics_of, unit_of, values_of

#: So many of the kept tokens go into a page when no prompts are named: at 8 bytes each a browser still opens it at once.
MOST_KEPT = 4_000_000
#: Of the frame in a notebook, in pixels.
FRAME_HEIGHT = 720


class Page(str):
    """The HTML of a page: a plain string that a notebook shows as the page, in a frame of its own."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        # Allowed to run its script and nothing else: it neither sees the notebook nor is seen by it.
        return (
            f'<iframe srcdoc="{html.escape(self)}" sandbox="allow-scripts" title="Logit lens" '
            f'style="width: 100%; height: {FRAME_HEIGHT}px; border: 0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<a page of {len(self) / 1000:.0f} kB>"


def lens_page(lens: LogitLensResult, path: str | os.PathLike[str] | None = None, *, prompts: Any = None) -> Page:
    """Make a page to explore a lens: layers × tokens, with everything that was kept at each cell.

    The page is one file that opens from the disk, without a network. It needs a browser, and nothing of the extra
    ``plot``. In a notebook, ``lens_page(lens)`` as the last line of a cell shows it there.

    Args:
        lens: what was read.
        path: the file to write, too; folders that are missing are made.
        prompts: which prompts, as indices; ``None`` for all, as long as the page stays small enough for a browser (it
            says how many are left out).

    Returns:
        The page's HTML, a string.

    Raises:
        InputError: there is no such prompt, or nothing in the lens.
        ArtifactError: the file can't be written.
    """
    check_lens(lens)
    shown = pick_prompts(lens, prompts) if prompts is not None else _that_fit(lens)
    data = json.dumps(page_data(lens, shown), separators=(",", ":"))  # ASCII: no character of a token is left as it is
    for char in "<>&":  # so that no token ends the script that holds it
        data = data.replace(char, f"\\u{ord(char):04x}")
    before, _, after = files("murano.plotting").joinpath("page.html").read_text(encoding="utf-8").partition("{{data}}")
    page = Page(before + data + after)
    if path is not None:
        try:
            with new_file(path) as file:
                file.write(page.encode("utf-8"))
        except OSError as error:
            raise ArtifactError(f"Can't write the page {os.fspath(path)!r}: {error.strerror or error}.") from error
    return page


def page_data(lens: LogitLensResult, prompts: list[int]) -> Mapping[str, Any]:
    """What the page's script reads. Rows are layers as the data flows; arrays are little-endian bytes in base64.

    Tokens are written once each, as ``labels.py`` writes them, and named by their place in that table.
    """
    layers = ordered_layers(lens)
    rows, row_title = row_labels([lens.addresses[layer] for layer in layers])
    words = lens.words.of(lens.top_ids[:, prompts], lens.input_ids[prompts])
    known = np.array(sorted(words), dtype=np.int64)
    index = np.dtype("<u2" if len(known) < 2**16 else "<u4")

    def places(ids: Any) -> Any:
        """Where ids stand in the table of words; one past its end where there is no token."""
        return np.where(ids < 0, len(known), np.searchsorted(known, ids)).astype(index)

    top_ids, top_probs = lens.top_ids.cpu().numpy(), as_array(lens.top_probs)
    shape = tuple(lens.entropy.shape)
    stats = {
        name: values
        for name in statistics_of(lens)
        if name != "prob" and (values := values_of(lens, name)).shape == shape  # "prob" is among those of the top k
    }

    def of_prompt(prompt: int) -> Mapping[str, Any]:
        columns = pick_positions(lens, prompt)
        cells = np.ix_(layers, [prompt], columns)
        ids = lens.input_ids[prompt, columns].tolist()
        return {
            "index": prompt,
            "name": _plain("".join(lens.words[token] for token in ids), 80),
            "tokens": places(np.array(ids)).tolist(),
            "positions": lens.position_index[prompt, columns].tolist(),
            "top": _packed(places(top_ids[cells])),
            "probs": _packed(top_probs[cells].astype("<f4")),
            "stats": [_packed(values[cells].astype("<f4")) for values in stats.values()],
        }

    return {
        "model": _plain(str(lens.model.get("model_id") or ""), 80),
        "layers": rows,
        "layerTitle": row_title,
        "k": int(lens.top_ids.shape[-1]),
        "words": [labels.label(words[token]) for token in known.tolist()],
        "ids": known.tolist(),
        "wide": index.itemsize > 2,
        "final": final_layer(lens) is not None,
        "stats": [[name, unit_of(name)] for name in stats],
        "prompts": [of_prompt(prompt) for prompt in prompts],
        "leftOut": lens.n_prompts - len(prompts),
        "notes": [_plain(note) for note in lens.notes],
    }


def _that_fit(lens: LogitLensResult) -> list[int]:
    """As many of the prompts, from the first on, as one page has room for."""
    kept = lens.attention_mask.sum(-1).cumsum(0) * lens.top_ids.shape[0] * lens.top_ids.shape[-1]
    return list(range(max(int((kept <= MOST_KEPT).sum()), 1)))


def _packed(array: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def _plain(text: str, limit: int | None = None) -> str:
    """A text that is no token, with what can't be seen escaped: in a label, a space is all that a dot stands for."""
    return labels.label(text, limit).replace(labels.SPACE, " ") if text else ""
