"""Which fonts draw a label: the reader's own, then whatever on this machine has the character."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from murano.plotting import labels
from murano.plotting.backend import Axes, font_manager, rcParams

#: Fonts that claim every character and draw a box or nothing for it.
_BLANK = ("last resort", "lastresort", "adobe blank", "adobeblank", "unicode bmp fallback")
#: matplotlib brings it along.
_ALWAYS = "DejaVu Sans"
#: How many fonts matplotlib had when the answers below were remembered.
_fonts_known = -1


def label(token: str, limit: int | None = None) -> str:
    """A token's label, with every character that no font of this machine has escaped."""
    return _label(token, limit, _base())


@functools.lru_cache(maxsize=16384)
def _label(token: str, limit: int | None, base: tuple[str, ...]) -> str:
    return labels.label(token, limit, lambda char: _family_of(char, base) is not None)


def drawable(text: str) -> str:
    """A text that is no token, such as a model's name, with what no font of this machine has escaped."""
    return "".join(char if char in " \n" or has_glyph(char) else labels.label(char, None, has_glyph) for char in text)


def draw_title(ax: Axes, title: str, room: float) -> None:
    """Write a title over axes, in two lines if it needs them, and no wider than its room, in inches."""
    if title:
        text = wrapped(title, room * 72 / 10)
        ax.set_title(text, fontsize=10, parse_math=False, usetex=False, family=families([text]))


def wrapped(text: str, ems: float) -> str:
    """A text that is no token, drawable and no wider than so many ems: in up to two lines, the second cut at its end."""
    lines: list[str] = []
    for word in drawable(text).split(" "):
        if lines and width(f"{lines[-1]} {word}") <= ems:
            lines[-1] += f" {word}"
        elif len(lines) < 2:
            lines.append(_cut(word, ems, both_ends=True))
        else:
            lines[-1] = _cut(f"{lines[-1]} {word}", ems)
            break
    return "\n".join(lines)


def _cut(text: str, ems: float, *, both_ends: bool = False) -> str:
    """As much of a text as is no wider than so many ems."""
    short = text
    for limit in range(labels.columns(text) - 1, 0, -1):
        if width(short) <= ems:
            break
        short = labels.prose(text, limit, has_glyph, both_ends=both_ends)
    return short


def has_glyph(char: str) -> bool:
    """Whether some font on this machine can draw a character."""
    return _family_of(char, _base()) is not None


def families(texts: Iterable[str]) -> list[str]:
    """The font families that together draw these texts, the reader's own first: matplotlib falls back by glyph."""
    base = _base()
    found = dict.fromkeys(base)
    for char in sorted({char for text in texts for char in text}):
        family = _family_of(char, base)
        if family is not None:
            found.setdefault(family, None)
    return list(found)


def width(text: str) -> float:
    """How wide a text is, in ems of its font size."""
    return _width(text, _base())


@functools.lru_cache(maxsize=16384)
def _width(text: str, base: tuple[str, ...]) -> float:
    return sum(_advance(char, base) for char in text)


def _base() -> tuple[str, ...]:
    """The families of the reader's style that exist here, then the one that matplotlib brings along."""
    global _fonts_known
    if (there := len(font_manager.fontManager.ttflist)) != _fonts_known:  # the reader has added a font since
        for cached in (_label, _width, _existing, _file, _family_of, _advance):
            cached.cache_clear()
        _fonts_known = there
    wanted = rcParams["font.family"]
    return _existing((*([wanted] if isinstance(wanted, str) else wanted), _ALWAYS))


@functools.lru_cache(maxsize=64)
def _existing(names: tuple[str, ...]) -> tuple[str, ...]:
    files: dict[str, str] = {}
    for name in names:
        if (path := _file(name)) is not None:
            files.setdefault(path, name)  # two names of one file would be searched twice for every text
    return tuple(files.values())


@functools.lru_cache(maxsize=4096)
def _file(family: str) -> str | None:
    """The file that matplotlib takes for a family in its normal weight."""
    try:
        return str(font_manager.findfont(font_manager.FontProperties(family=[family]), fallback_to_default=False))
    except ValueError:
        return None


@functools.lru_cache(maxsize=16384)
def _family_of(char: str, base: tuple[str, ...]) -> str | None:
    for family in base:
        if _draws(family, char):
            return family
    return next((family for family in _candidates() if _draws(family, char)), None)


def _candidates() -> list[str]:
    """All other families: plain sans-serif ones first, which go best with labels."""
    # Those without a regular face (light, condensed) would make matplotlib log that it takes another weight.
    names = {
        f.name
        for f in font_manager.fontManager.ttflist
        if f.weight in (400, "normal", "regular") and f.style == "normal"
    }
    return sorted(names, key=lambda name: ("Noto Sans" not in name, "sans" not in name.lower(), name))


def _draws(family: str, char: str) -> bool:
    path = _file(family)
    if path is None or family.lower().lstrip(".").startswith(_BLANK):
        return False
    try:
        font = font_manager.get_font(path)
        # Colour emoji fonts hold bitmaps of one size, which matplotlib can't draw.
        return bool(font.scalable) and font.get_char_index(ord(char)) != 0
    except (OSError, RuntimeError):  # a broken or foreign font file
        return False


@functools.lru_cache(maxsize=16384)
def _advance(char: str, base: tuple[str, ...]) -> float:
    family = _family_of(char, base)
    path = None if family is None else _file(family)
    if path is None:
        return 1.0
    font = font_manager.get_font(path)
    font.set_size(100, 72)
    return float(font.load_char(ord(char)).linearHoriAdvance) / 65536 / 100
