"""A grid of shaded cells with a token in each: what every heatmap of a lens is, apart from what it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from murano.plotting import fonts
from murano.plotting.backend import Axes, Line2D, Rectangle, Size, inner_size, np, place_axes
from murano.plotting.scales import Scale

#: Colours that stay apart for colour-blind readers, on light and on dark cells. Texts outside the cells have colours
#: of the reader's style, which may be a dark one.
MARK = "#d55e00"
INK, PAPER, FAINT = "#1a1a1a", "#ffffff", "#767676"
#: Width of the place of columns that are left out, in columns.
GAP = 0.45
#: With more columns than this cells are only shaded: with text the figure would be metres wide.
MOST_WRITTEN = 64
#: A text smaller than this, in points, is no text.
SMALLEST = 4.5

#: The tokens of one cell: several are written under each other. ``None``: nothing is there.
Words = Sequence[str] | None


@dataclass(frozen=True)
class Grid:
    """What a heatmap shows.

    Args:
        values: ``[row, column]``, the bottom row first.
        scale: how they become colours.
        rows: the row labels.
        row_title: what the rows are.
        words: the tokens in each cell; ``None`` for cells without text.
        below: the tokens, or plain numbers, under the columns.
        below_title: what they are.
        above: the tokens over the columns, if any.
        above_title: what they are.
        left_out: how many columns are missing before a column.
        settled: the row from which a column's top token stays.
        plain_below: the texts below are no tokens.
        title: of the figure.
    """

    values: Any
    scale: Scale
    rows: Sequence[str]
    row_title: str
    words: Sequence[Sequence[Words]] | None
    below: Sequence[Words]
    below_title: str
    above: Sequence[Words] = ()
    above_title: str = ""
    left_out: Mapping[int, int] = field(default_factory=dict)
    settled: Mapping[int, int] = field(default_factory=dict)
    plain_below: bool = False
    title: str = ""

    @property
    def n_columns(self) -> int:
        return int(self.values.shape[1])

    @property
    def lines(self) -> int:
        """How many tokens stand under each other in a cell."""
        return max((len(words) for row in self.words or () for words in row if words), default=1)

    def size(self) -> Size:
        """How large a figure has to be for all of it to be read."""
        limit, points = self._natural_text()
        row = 0.19 if len(self.rows) <= 48 else 0.1
        if self.words is not None and points:
            column = max(_width(text) for text in self._labels(limit)) * points / 72 + 0.09
            column, row = max(column, 0.3), points * (1.3 * self.lines + 0.7) / 72
        else:
            column = min(max(9.0 / self.n_columns, 0.14 if self.above or not self.plain_below else 0.012), 0.3)
        width = max(column * (self.n_columns + GAP * len(self.left_out)), 1.6)
        ends = [text for words in (*self.above, *self.below) for text in [_label(words, limit)]]
        upright = (
            max(map(_width, ends), default=0) * 8 / 72 if points == 0 and not self.plain_below else 0.17 * self.lines
        )
        lines = self.below_title.split("\n")
        left = 0.45 + max(map(fonts.width, self.rows), default=0) * 8 / 72
        right = 0.95
        # The line under a narrow figure may be wider than its axes.
        widest = max(*(fonts.width(line) * 9 / 72 for line in lines), fonts.width(self.title) * 10 / 72)
        spare = max(widest - width, 0) / 2
        return Size(
            width=width,
            height=max(row * len(self.rows), 1.1),
            left=max(left, spare),
            right=max(right, spare),
            bottom=0.16 + upright + 0.15 * len(lines),
            top=0.08 + 0.3 * bool(self.title) + (0.2 + upright if self.above else 0.0),
        )

    def draw(self, ax: Axes | None = None, *, bare: bool = False) -> Axes:
        """Draw the grid.

        Args:
            ax: where to; without it a new figure of the right size is made.
            bare: whether the new figure is one that pyplot does not know.
        """
        size = self.size()
        own = size if ax is None else None
        ax, room = place_axes(ax, size, bare)
        edges, centres = self._columns()
        mesh = ax.pcolormesh(
            edges,
            np.arange(len(self.rows) + 1) - 0.5,
            self._mesh_values(),
            cmap=self.scale.colormap,
            norm=self.scale.norm,
        )
        ax.set(xlim=(edges[0], edges[-1]), ylim=(-0.5, len(self.rows) - 0.5))
        ax.grid(False)
        ax.set_facecolor("none")  # what lies behind gaps and empty cells is the figure, light or dark
        ax.spines[:].set_visible(False)
        self._draw_bar(ax, mesh, own)
        width, height = (own.width, own.height) if own is not None else inner_size(ax)
        cell = (72 * width / edges[-1], 72 * height / len(self.rows))
        limit, points = self._text_for(cell)
        figure = ax.get_figure(root=True)
        assert figure is not None
        if min(cell) > 6:  # lines between cells, where they are not most of what one sees; unseen where there are none
            mesh.set(edgecolor=figure.get_facecolor(), linewidth=0.6)
        families = fonts.families([*self._labels(limit), *map(_joined, self.below), fonts.label("x")])
        self._draw_rows(ax, cell[1])
        self._draw_ends(ax, centres, cell[0], limit, families, room)
        if points >= SMALLEST:
            self._draw_words(ax, centres, cell, limit, points, families)
        self._draw_gaps(ax, edges, centres, 72 * height)
        self._draw_settled(ax, edges)
        fonts.draw_title(ax, self.title, room)
        return ax

    # -- columns -----------------------------------------------------------------------------------------------------

    def _columns(self) -> tuple[Any, list[float]]:
        """The edges of all columns, those of the gaps among them, and the centres of the real ones."""
        edges, centres = [0.0], []
        for column in range(self.n_columns):
            if column in self.left_out:
                edges.append(edges[-1] + GAP)
            centres.append(edges[-1] + 0.5)
            edges.append(edges[-1] + 1)
        return np.array(edges), centres

    def _mesh_values(self) -> Any:
        """The values, with an empty column for each gap."""
        gaps = sorted(self.left_out)
        return np.ma.masked_invalid(np.insert(self.values.astype(float), gaps, np.nan, axis=1))

    # -- text --------------------------------------------------------------------------------------------------------

    def _natural_text(self) -> tuple[int, float]:
        """How wide a label may be and how large it is written, where the figure may be as large as it needs."""
        if self.n_columns <= 12:
            return 14, 8.0
        if self.n_columns <= 24:
            return 10, 8.0
        return (7, 6.5) if self.n_columns <= MOST_WRITTEN else (7, 0.0)

    def _text_for(self, cell: tuple[float, float]) -> tuple[int, float]:
        """The same for cells of a given size, in points."""
        limit, points = self._natural_text()
        points = min(points, cell[1] / (1.3 * self.lines + 0.3))
        if self.words is None or points < SMALLEST or cell[0] < 2.5 * points:
            return limit, 0.0
        return min(limit, int(cell[0] / (0.5 * points))), points

    def _labels(self, limit: int) -> list[str]:
        """Every label that is a token."""
        cells = [words for row in self.words or () for words in row]
        ends = [*self.above, *(() if self.plain_below else self.below)]
        return sorted({fonts.label(word, limit) for words in (*cells, *ends) if words for word in words})

    def _draw_words(
        self,
        ax: Axes,
        centres: list[float],
        cell: tuple[float, float],
        limit: int,
        points: float,
        families: list[str],
    ) -> None:
        assert self.words is not None
        colours = self.scale.colormap(self.scale.norm(np.ma.masked_invalid(self.values)))
        for row, line in enumerate(self.words):
            for column, words in enumerate(line):
                if words is None:
                    text, size, colour = "–", points, FAINT
                else:
                    text, size = _fitted(words, limit, points, cell[0] - 3)
                    colour = _ink_on(colours[row, column])
                # One line stands on a common baseline: centred by its own height, each word would sit elsewhere.
                one = "\n" not in text
                ax.text(
                    centres[column],
                    row - 0.36 * points / cell[1] if one else row,
                    text,
                    ha="center",
                    va="baseline" if one else "center",
                    fontsize=size,
                    color=colour,
                    family=families,
                    parse_math=False,
                    usetex=False,
                    linespacing=1.15,
                ).set_in_layout(False)

    def _draw_ends(
        self, ax: Axes, centres: list[float], width: float, limit: int, families: list[str], room: float
    ) -> None:
        """The labels under the columns, and those above."""
        below = self._end_texts(self.below, limit, width) if not self.plain_below else list(map(_joined, self.below))
        self._label_columns(ax.xaxis, centres, below, width, families)
        title = "\n".join(fonts.wrapped(line, room * 72 / 8) for line in self.below_title.split("\n"))
        ax.set_xlabel(title, fontsize=8, parse_math=False, usetex=False, family=fonts.families([title]))
        if not self.above:
            return
        top = ax.secondary_xaxis("top")
        top.spines[:].set_visible(False)
        self._label_columns(top.xaxis, centres, self._end_texts(self.above, limit, width), width, families)
        top.set_xlabel(self.above_title, fontsize=8)

    def _end_texts(self, ends: Sequence[Words], limit: int, width: float) -> list[str]:
        """Labels outside the cells: as short as those inside if they then fit, else long, as they will be upright."""
        short = [_label(words, limit) for words in ends]
        if _fit(short, width):
            return short
        return [_label(words, min(self._natural_text()[0], 10)) for words in ends]

    @staticmethod
    def _label_columns(axis: Any, centres: list[float], texts: list[str], width: float, families: list[str]) -> None:
        points = _end_points(texts)
        widest = max((_width(text) for text in texts), default=0.0) * points
        flat = _fit(texts, width)
        # Upright labels need a line each; where even that is too much, only every n-th is written.
        every = 1 if flat else max(1, int(np.ceil((points * 1.1) / width)))
        if texts and all(text.isdigit() for text in texts) and not flat:
            every, flat = _round_step(widest * 1.5 / width), True
        shown = range(0, len(texts), every)
        axis.set_ticks(
            [centres[i] for i in shown],
            labels=[texts[i] for i in shown],
            fontsize=points,
            family=families,
            parse_math=False,
            usetex=False,
            rotation=0 if flat else 90,
        )
        axis.set_ticks([], minor=True)
        axis.set_tick_params(length=0, pad=2)

    def _draw_rows(self, ax: Axes, height: float) -> None:
        every = max(1, int(np.ceil(8 * 1.1 / height)))
        shown = range(0, len(self.rows), every)
        ax.set_yticks(list(shown), labels=[self.rows[i] for i in shown], fontsize=8, parse_math=False)
        ax.set_yticks([], minor=True)
        ax.tick_params(axis="y", length=0, pad=3)
        ax.set_ylabel(self.row_title, fontsize=8)

    # -- marks -------------------------------------------------------------------------------------------------------

    def _draw_bar(self, ax: Axes, mesh: Any, own: Size | None) -> None:
        figure = ax.get_figure()
        assert figure is not None
        if own is not None:
            bar = figure.colorbar(mesh, cax=ax.inset_axes((1 + 0.1 / own.width, 0, 0.12 / own.width, 1)))
        else:
            bar = figure.colorbar(mesh, ax=ax, pad=0.02, aspect=30)
        bar.set_label(self.scale.unit, fontsize=8, parse_math=False, usetex=False)
        bar.ax.tick_params(labelsize=7, length=2, width=0.6)
        bar.outline.set_visible(False)

    def _draw_gaps(self, ax: Axes, edges: Any, centres: list[float], height: float) -> None:
        for column, count in self.left_out.items():
            middle = centres[column] - 0.5 - GAP / 2
            text = f"⋯ {count} not shown ⋯" if count > 1 and height > 90 else "⋯"
            ax.text(
                middle,
                (len(self.rows) - 1) / 2,
                text,
                rotation=90,
                ha="center",
                va="center",
                fontsize=6.5,
                color=FAINT,
                family=fonts.families([text]),
            ).set_in_layout(False)

    def _draw_settled(self, ax: Axes, edges: Any) -> None:
        """Where each column's top token stays: a frame around a lone column, a line of steps across many."""
        if not self.settled:
            return
        _, centres = self._columns()
        if len(self.settled) == 1 and self.n_columns * len(self.rows):
            ((column, row),) = self.settled.items()
            frame = Rectangle((centres[column] - 0.5, row - 0.5), 1, len(self.rows) - row)
            frame.set(fill=False, edgecolor=MARK, linewidth=1.6, zorder=4, clip_on=False, joinstyle="miter")
            frame.set_gid("settled")
            ax.add_patch(frame)
            return
        xs: list[float] = []
        ys: list[float] = []
        for column in range(self.n_columns):
            level = self.settled[column] - 0.5 if column in self.settled else np.nan
            xs += [centres[column] - 0.5, centres[column] + 0.5]
            ys += [level, level]
        ax.add_line(Line2D(xs, ys, color=MARK, linewidth=1.2, zorder=4, gid="settled"))


def _end_points(texts: list[str]) -> float:
    """The size of labels outside the cells."""
    return 8.0 if len(texts) <= 24 else 6.5


def _fit(texts: list[str], width: float) -> bool:
    """Whether labels outside the cells fit side by side."""
    return max((_width(text) for text in texts), default=0.0) * _end_points(texts) <= width * 1.02


def _joined(words: Words) -> str:
    return "\n".join(words or ())


def _label(words: Words, limit: int) -> str:
    return "\n".join(fonts.label(word, limit) for word in words or ())


def _width(text: str) -> float:
    """Of the widest line, in ems."""
    return max(map(fonts.width, text.split("\n")))


def _fitted(words: Sequence[str], limit: int, points: float, width: float) -> tuple[str, float]:
    """A cell's text and its size: a little smaller, then shorter, until it fits into its cell."""
    for shorter in range(limit, 1, -1):
        text = _label(words, shorter)
        needed = _width(text) * points
        if needed <= width:
            return text, points
        if needed * 0.8 <= width and points * 0.8 >= SMALLEST:
            return text, points * width / needed
    return text, points


def _ink_on(colour: Any) -> str:
    """Dark or light, whichever has the higher contrast on a colour (WCAG 2)."""
    red, green, blue, alpha = colour
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (alpha * channel + 1 - alpha for channel in (red, green, blue))
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # Contrast with white is 1.05 / (L + 0.05), with the ink (L + 0.05) / 0.06.
    return PAPER if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.06 else INK


def _round_step(least: float) -> int:
    """1, 2, 5, 10, 20 …: the first that is not below ``least``."""
    steps = (base * 10**power for power in range(7) for base in (1, 2, 5))
    return next((step for step in steps if step >= least), 10**7)
