r"""How a token is written: as the reader has to see it, whatever is in it.

Spaces are shown as ``·``, and as ``␣`` where there is nothing else; line breaks, tabs, controls and zero-width
characters as the escapes Python would write (``\n``, ``\u200b``); a combining mark without a letter sits on ``◌``; an
empty token is ``∅``. What a font can't draw is escaped too. Bytes of split characters, ``<0xE6><0x88>``, are written
``<E6 88>``: a blank that stands for no space keeps them apart from a token that is spelled so. Everything else,
``$ _ \ ^ { } < &`` included, stands for itself: whoever draws a label has to turn the mark-up of the place off
(``parse_math=False`` in matplotlib) or use :func:`html_label`.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Iterator

SPACE = "·"
#: Alone, a dot in the middle is too easily taken for one on the line.
LONE_SPACE = "␣"
EMPTY = "∅"
ELLIPSIS = "…"
#: What a combining mark stands on when the token has no letter for it.
DOTTED_CIRCLE = "◌"
#: More marks than this on one letter would run into the line above.
MAX_MARKS = 2
#: In fewer columns than this only the beginning of a token is kept.
BOTH_ENDS = 7

#: A token of bytes that are no whole characters.
_BYTES = re.compile(r"(<0x[0-9A-F]{2}>)+")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
#: Unicode categories that leave no ink, or none that anyone would recognise.
_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp")
#: Joiners, without which letters and emoji of a text would look otherwise.
_SHAPING = (0x200C, 0x200D)
_BLANK = (0x034F, 0x115F, 0x1160, 0x180B, 0x180C, 0x180D, 0x180F, 0x2800, 0x3164, 0xFFA0)


def label(token: str, limit: int | None = None, has_glyph: Callable[[str], bool] | None = None) -> str:
    r"""A token as it is to be read on a figure.

    Args:
        token: the token's text.
        limit: how many columns wide it may be (a Chinese character or an emoji takes two); a longer one loses its
            middle, or its end where there is no room for both ends. Of bytes the last ones are kept: the first are much alike.
        has_glyph: whether a character can be drawn; without it every visible character can.

    >>> label(" Paris"), label("\n\t"), label("$x_1$"), label("")
    ('·Paris', '\\n\\t', '$x_1$', '∅')
    >>> label("internationalization", limit=9)
    'inte…tion'
    >>> label("<0xE6><0x88>"), label("<0xE6><0x88>", limit=4)
    ('<E6 88>', '…88>')
    """
    if _BYTES.fullmatch(token):
        return _bytes(re.findall("[0-9A-F]{2}", token), limit)
    pieces = list(_pieces(token, has_glyph or (lambda _: True))) or [EMPTY]
    return "".join(pieces) if limit is None else _shortened(pieces, limit)


def prose(
    text: str, limit: int | None = None, has_glyph: Callable[[str], bool] | None = None, *, both_ends: bool = False
) -> str:
    r"""A text that is no token, such as a prompt or a model's name, on one line: spaces are spaces.

    Line breaks, controls and marks of direction are escaped; joiners stay, for they shape the letters around them.

    Args:
        text: the text.
        limit: how many columns wide it may be; a longer one loses its end.
        has_glyph: whether a character can be drawn; without it every visible character can.
        both_ends: of one that is too long, keep both ends.

    >>> prose("One line\nand another"), prose("The capital of France", limit=9)
    ('One line\\nand another', 'The capi…')
    """
    drawn = has_glyph or (lambda _: True)
    pieces = [char if _is_prose(char) and drawn(char) else _escaped(char) for char in text]
    return "".join(pieces) if limit is None else _shortened(pieces, limit, both_ends)


def html_label(token: str, limit: int | None = None) -> str:
    """The label as HTML text: ``&``, ``<``, ``>`` and quotes are escaped, so that ``</script>`` is harmless anywhere.

    >>> html_label(" <b>")
    '·&lt;b&gt;'
    """
    return html.escape(label(token, limit))


def columns(text: str) -> int:
    """How many columns a text takes in a fixed-width font."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _pieces(token: str, has_glyph: Callable[[str], bool]) -> Iterator[str]:
    """What must not be torn apart when a label is shortened: an escape, or a letter with its marks."""
    piece, marks = "", 0
    space = LONE_SPACE if not token.strip(" ") and has_glyph(LONE_SPACE) else SPACE if has_glyph(SPACE) else "_"
    for char in token:
        if _is_mark(char):
            marks += 1
            if marks <= MAX_MARKS and has_glyph(char) and (piece or has_glyph(DOTTED_CIRCLE)):
                piece = (piece or DOTTED_CIRCLE) + char
                continue
        else:
            marks = 0
        if piece:
            yield piece
        piece = ""
        if char == " ":
            yield space  # not a piece that a mark could stand on: it would look like a letter
        elif _is_mark(char) or _needs_escape(char) or not has_glyph(char):
            yield _escaped(char)
        else:
            piece = char
    if piece:
        yield piece


def _is_prose(char: str) -> bool:
    """Whether a character stands for itself in a text that is no token."""
    return char == " " or ord(char) in _SHAPING or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _bytes(codes: list[str], limit: int | None) -> str:
    """Bytes in hexadecimal digits, or as many of the last ones as fit behind an ellipsis."""
    forms = [f"<0x{codes[0]}>"] if len(codes) == 1 else []
    forms += [f"<{' '.join(codes)}>", *(f"{ELLIPSIS}{' '.join(codes[i:])}>" for i in range(1, len(codes)))]
    cut = (ELLIPSIS + codes[-1])[:limit]
    return next((form for form in forms if limit is None or len(form) <= limit), cut)


def _is_mark(char: str) -> bool:
    """Whether a character is drawn over the one before it."""
    return unicodedata.category(char).startswith("M") and not _is_selector(char)


def _needs_escape(char: str) -> bool:
    # A token that is a middle dot must not read as a space, nor one that is a dotted circle as a lone mark.
    unclear = char in (SPACE, LONE_SPACE, EMPTY, DOTTED_CIRCLE)
    return unclear or unicodedata.category(char) in _INVISIBLE or _is_selector(char)


def _is_selector(char: str) -> bool:
    """Variation selectors and their like are marks by category, but draw nothing; nor do Hangul fillers."""
    code = ord(char)
    return 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF or code in _BLANK


def _escaped(char: str) -> str:
    code = ord(char)
    if char in _SHORT:
        return _SHORT[char]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _shortened(pieces: list[str], limit: int, both_ends: bool = True) -> str:
    """The pieces, or as many from both ends as fit around an ellipsis; the beginning has the first claim."""
    both_ends = both_ends and limit >= BOTH_ENDS
    widths = [columns(piece) for piece in pieces]
    if sum(widths) <= limit:
        return "".join(pieces)
    room = limit - 1
    head, tail = 0, len(pieces)
    from_head = True
    while head < tail:
        width = widths[head] if from_head else widths[tail - 1]
        if width > room:
            break
        room -= width
        head, tail = (head + 1, tail) if from_head else (head, tail - 1)
        from_head = not from_head or not both_ends
    if head == 0:  # the first piece alone is too wide: an escape
        return pieces[0][: limit - 1] + ELLIPSIS
    return "".join(pieces[:head]) + ELLIPSIS + "".join(pieces[tail:])
