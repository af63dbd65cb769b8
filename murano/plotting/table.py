"""A lens as a small static HTML table: what a notebook shows of it, also where no script may run."""

from __future__ import annotations

import html

from murano.artifacts.logit_lens import LogitLensResult
from murano.plotting.labels import html_label
from murano.plotting.selection import check_lens, final_layer, ordered_layers, pick_positions, read_prompts, row_labels

#: So many tokens, the last ones, and so many layers are shown; of more layers an even choice.
COLUMNS, ROWS = 8, 32
#: How wide a label may be, and how many of the top k a cell tells when the pointer rests on it.
WIDTH, HINTS = 12, 3

#: At most 65 % strong: the text, black or white as the notebook's theme has it, stays legible on it.
_SHADE, STRONGEST = "rgba(70,140,210,{:.2f})", 0.65
_CELL = "padding:1px 6px;text-align:center;white-space:pre"
_NAME = "padding:1px 6px;text-align:right;opacity:.7;font-weight:normal"


#: Where to see more than the table has room for.
MORE = "All of it, to explore: <code>murano.plotting.lens_page(lens)</code>"


def html_table(lens: LogitLensResult, prompt: int | None = None, more: str = MORE) -> str:
    """Layers × the last tokens of a prompt, shaded by probability, without script, style sheet or ids.

    Args:
        lens: what was read.
        prompt: index of the prompt; ``None`` for the first of which something was read.
        more: what is said below it, as HTML.
    """
    check_lens(lens)
    prompt = read_prompts(lens)[0] if prompt is None else prompt
    order = ordered_layers(lens)
    count = min(ROWS, len(order))
    layers = [order[round(i * (len(order) - 1) / max(count - 1, 1))] for i in range(count)]
    there = pick_positions(lens, prompt)
    columns = there[-COLUMNS:]
    names, _ = row_labels([lens.addresses[layer] for layer in layers])
    lines = [_line("token", [_end(lens, token) for token in lens.input_ids[prompt, columns].tolist()])]
    for name, layer in zip(names, layers, strict=True):
        lines.append(_line(name, [_cell(lens, layer, prompt, column) for column in columns]))
    if (final := final_layer(lens)) is not None:
        answers = lens.predicted_tokens[final, prompt, columns].tolist()
        lines.append(_line("answer", [_end(lens, token) for token in answers]))
    notes = [
        f"{html.escape(repr(lens))}.",
        f"Prompt {prompt} of {lens.n_prompts}." if lens.n_prompts > 1 else "",
        f"The last {len(columns)} of {len(there)} tokens." if len(columns) < len(there) else "",
        f"{count} of {len(order)} layers." if count < len(order) else "",
        more,
    ]
    return (
        f'<div style="overflow-x:auto"><table style="border-collapse:collapse;font-size:12px">{"".join(lines[::-1])}'
        f'</table><p style="font-size:12px;opacity:.7">{" ".join(filter(None, notes))}</p></div>'
    )


def _line(name: str, cells: list[str]) -> str:
    return f'<tr style="background:none"><th style="{_NAME}">{html.escape(name)}</th>{"".join(cells)}</tr>'


def _end(lens: LogitLensResult, token: int) -> str:
    return f'<td style="{_CELL};font-weight:bold">{_label(lens, token)}</td>'


def _cell(lens: LogitLensResult, layer: int, prompt: int, column: int) -> str:
    top = [
        (int(token), float(probability))
        for token, probability in zip(
            lens.top_ids[layer, prompt, column, :HINTS], lens.top_probs[layer, prompt, column, :HINTS], strict=True
        )
        if token >= 0
    ]
    hint = "&#10;".join(f"{_label(lens, token)}  {probability:.3f}" for token, probability in top)
    strength = top[0][1] * STRONGEST if top and top[0][1] == top[0][1] else 0.0
    shade = f"background:{_SHADE.format(strength)}"
    return f'<td style="{_CELL};{shade}" title="{hint}">{_label(lens, top[0][0]) if top else "–"}</td>'


def _label(lens: LogitLensResult, token: int) -> str:
    return html_label(lens.words[token], WIDTH) if token >= 0 else "–"
