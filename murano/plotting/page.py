"""A page to explore a lens in a browser: one file that loads nothing, from the network or otherwise."""

from __future__ import annotations

import base64
import html
import json
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from murano.artifacts.folder import new_file
from murano.artifacts.logit_lens import LogitLensResult
from murano.errors import ArtifactError, InputError
from murano.plotting import labels
from murano.plotting.paths import check_path
from murano.plotting.selection import (
    called,
    check_lens,
    final_layer,
    ordered_layers,
    pick_positions,
    pick_prompts,
    read_prompts,
    row_labels,
)
from murano.plotting.table import html_table
from murano.plotting.values import as_array, statistics_of, unit_of, values_of

#: So many of the kept tokens go into a page when no prompts are named: at 8 bytes each a browser still opens it at once.
MOST_KEPT = 4_000_000
#: Of the frame in a notebook, in pixels.
FRAME_HEIGHT = 720
#: So wide is a prompt's name.
NAME_WIDTH = 80
#: What stands in a notebook in place of a frame that was taken out.
NO_FRAME = "<p>To see the page here, trust this notebook or run the cell; its last tokens:</p>"


class Page(str):
    """The HTML of a page: a plain string that a notebook shows as the page, in a frame of its own.

    Args:
        text: the HTML.
        fallback: what stands in the notebook in place of a frame that is taken out, as in one that is not trusted.
    """

    fallback: str

    def __new__(cls, text: str, fallback: str = "") -> Page:
        page = super().__new__(cls, text)
        page.fallback = fallback
        return page

    def _repr_html_(self) -> str:
        # Allowed to run its script and nothing else: it neither sees the notebook nor is seen by it. Whoever takes the frame out
        # takes what it does when it has loaded with it, and the fallback stays.
        return (
            f'<iframe srcdoc="{html.escape(self)}" sandbox="allow-scripts" title="Logit lens" '
            f'onload="this.nextElementSibling.hidden = true" '
            f'style="width: 100%; height: {FRAME_HEIGHT}px; border: 0"></iframe><div>{self.fallback}</div>'
        )

    def __repr__(self) -> str:
        return f"<a page of {len(self) / 1000:.0f} kB: lens_page(lens, 'lens.html') writes it to a file>"


def lens_page(lens: LogitLensResult, path: str | os.PathLike[str] | None = None, *, prompts: Any = None) -> Page:
    """Make a page to explore a lens: layers × tokens, with everything that was kept at each cell.

    The page is one file that opens from the disk, without a network. It needs a browser, and nothing of the extra
    ``plot``. In a notebook, ``lens_page(lens)`` as the last line of a cell shows it there.

    Args:
        lens: what was read.
        path: the file to write, too, which ends in ``.html``; folders that are missing are made.
        prompts: which prompts, as indices; ``None`` for all, as long as the page stays small enough for a browser (it
            says how many are left out).

    Returns:
        The page's HTML, a string.

    Raises:
        InputError: there is no such prompt, nothing in the lens, or the file has another ending.
        ArtifactError: the file can't be written.
    """
    check_lens(lens)
    name = None if path is None else _page_name(path)
    there = read_prompts(lens)
    shown = pick_prompts(lens, prompts) if prompts is not None else _that_fit(lens, there)
    left_out = len(there) - len(shown) if prompts is None else 0
    data = json.dumps(
        page_data(lens, shown, left_out), separators=(",", ":")
    )  # ASCII: no character of a token is left as it is
    for char in "<>&":  # so that no token ends the script that holds it
        data = data.replace(char, f"\\u{ord(char):04x}")
    before, _, after = files("murano.plotting").joinpath("page.html").read_text(encoding="utf-8").partition("{{data}}")
    page = Page(before + data + after, NO_FRAME + html_table(lens, shown[0], more=""))
    if name is not None:
        try:
            with new_file(name) as file:
                file.write(page.encode("utf-8"))
        except OSError as error:
            raise ArtifactError(f"Can't write the page {name!r}: {error.strerror or error}.") from error
    return page


def _page_name(path: Any) -> str:
    """The name of a page's file.

    Raises:
        InputError: it is no path, or does not end as a page does.
    """
    name = check_path(path, "lens.html")
    if (ending := Path(name).suffix).lower() in (".html", ".htm"):
        return name
    hint = (
        f" For an image: save_figure(plot_lens(lens), {name!r})." if ending.lower() in (".png", ".svg", ".pdf") else ""
    )
    raise InputError(f"{name!r} is no name of a page: write {name.removesuffix(ending) + '.html'!r}.{hint}")


def page_data(lens: LogitLensResult, prompts: list[int], left_out: int = 0) -> Mapping[str, Any]:
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
            "name": _prompt_name(lens, prompt, ids),
            "tokens": places(np.array(ids)).tolist(),
            "positions": lens.position_index[prompt, columns].tolist(),
            "top": _packed(places(top_ids[cells])),
            "probs": _packed(top_probs[cells].astype("<f4")),
            "stats": [_packed(values[cells].astype("<f4")) for values in stats.values()],
        }

    return {
        "model": called(lens.model),
        "layers": rows,
        "layerTitle": row_title,
        "k": int(lens.top_ids.shape[-1]),
        "words": [labels.label(words[token]) for token in known.tolist()],
        "ids": known.tolist(),
        "wide": index.itemsize > 2,
        "final": final_layer(lens) is not None,
        "stats": [[name, unit_of(name)] for name in stats],
        "prompts": [of_prompt(prompt) for prompt in prompts],
        "leftOut": left_out,
        "notes": [labels.prose(note) for note in lens.notes],
    }


def _that_fit(lens: LogitLensResult, there: list[int]) -> list[int]:
    """As many of these prompts, from the first on, as one page has room for."""
    kept = lens.attention_mask[there].sum(-1).cumsum(0) * lens.top_ids.shape[0] * lens.top_ids.shape[-1]
    return there[: max(int((kept <= MOST_KEPT).sum()), 1)]


def _packed(array: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def _prompt_name(lens: LogitLensResult, prompt: int, ids: list[int]) -> str:
    """A prompt as it was typed; what was given as tokens, or not kept, as these read."""
    given = None if lens.prompts is None else lens.prompts[prompt]
    typed = str(given) if given is not None and (given.text or given.messages) else ""
    return labels.prose(typed or "".join(lens.words[token] for token in ids), NAME_WIDTH)
