"""How tokens are written: what the reader must be able to tell apart, in matplotlib and in HTML."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lenses import make_lens

from murano.plotting.labels import columns, html_label, label, prose


@pytest.mark.parametrize(
    ("token", "written"),
    [
        (" Paris", "·Paris"),
        ("Paris", "Paris"),
        ("a b ", "a·b·"),
        (" ", "␣"),
        ("    ", "␣␣␣␣"),
        ("", "∅"),
        ("\n", r"\n"),
        ("\r\n\t", r"\r\n\t"),
        ("\x00\x1b\x7f", r"\x00\x1b\x7f"),
        ("\xa0", r"\xa0"),
        ("\u3000", r"\u3000"),
        ("\u200b", r"\u200b"),  # zero width
        ("a\u202eb", r"a\u202eb"),  # would turn the rest of the line around
        ("👩\u200d👩", r"👩\u200d👩"),
        ("❤\ufe0f", r"❤\ufe0f"),
        ("\ud800", r"\ud800"),
        ("\u0301", "◌\u0301"),
        ("e\u0301", "e\u0301"),
        (" \u0301", "·◌\u0301"),
        ("e" + "\u0301" * 4, "e\u0301\u0301" + r"\u0301\u0301"),
        ("$x_1^{2}$ \\frac <b> &amp;", "$x_1^{2}$·\\frac·<b>·&amp;"),
        ("<0xE2>", "<0xE2>"),
        ("<0xE6><0x88>", "<E6 88>"),
        ("<E6 88>", "<E6·88>"),  # a token that is spelled so
        ("⟨50300⟩", "⟨50300⟩"),
        ("·", r"\xb7"),  # not a space
        ("␣", r"\u2423"),
        ("∅", r"\u2205"),
        ("中国", "中国"),
        ("مرحبا", "مرحبا"),
    ],
)
def test_label(token: str, written: str) -> None:
    assert label(token) == written


def test_what_no_font_has_is_escaped() -> None:
    assert label("中a", has_glyph=str.isascii) == r"\u4e2da"
    assert label("😀", has_glyph=str.isascii) == r"\U0001f600"
    assert label(" a", has_glyph=str.isascii) == "_a"
    assert label("\u0301", has_glyph=str.isascii) == r"\u0301"


@pytest.mark.parametrize(
    ("token", "limit", "written"),
    [
        ("internationalization", 20, "internationalization"),
        ("internationalization", 9, "inte…tion"),
        ("internationalization", 8, "inte…ion"),
        ("internationalization", 5, "inte…"),
        ("x" * 200, 7, "xxx…xxx"),
        ("中国中国", 8, "中国中国"),
        ("中国中国", 7, "中国…国"),
        ("\u200b\u200c", 8, r"\u200b…"),  # an escape is not torn apart
        ("\U000e0001", 8, r"\U000e0…"),
        ("", 1, "∅"),
        ("<0x20><0xE6><0x88>", 7, "…E6 88>"),  # of bytes, the last ones tell tokens apart
        ("<0xE6><0x88>", 7, "<E6 88>"),
        ("<0xE6><0x88>", 6, "…88>"),
        ("<0xE6><0x88>", 3, "…88"),
        ("<0xE2>", 5, "<E2>"),
        ("<0xE2>", 3, "…E2"),
    ],
)
def test_long_tokens_lose_their_middle(token: str, limit: int, written: str) -> None:
    assert label(token, limit) == written


@pytest.mark.parametrize(
    ("text", "limit", "written"),
    [
        ("The capital of France is", 12, "The capital…"),
        ("Das Maß · für\tüber\nalles\x00", None, r"Das Maß · für\tüber\nalles\x00"),
        ("东京是日本的首都", 8, "东京是…"),
        ("مرحبا \u202eabc", None, r"مرحبا \u202eabc"),
        ("می\u200cخواهم", None, "می\u200cخواهم"),  # the joiner shapes the letters beside it
        ("\ud800", None, r"\ud800"),
        ("", 9, ""),
    ],
)
def test_a_text_that_is_no_token_reads_as_it_was_typed(text: str, limit: int | None, written: str) -> None:
    assert prose(text, limit) == written


def test_html() -> None:
    assert html_label("</script>") == "&lt;/script&gt;"
    assert html_label(" \"a\" & 'b'") == "·&quot;a&quot;·&amp;·&#x27;b&#x27;"


@given(st.text(max_size=40), st.integers(3, 20))
def test_any_token_has_a_label_that_can_be_seen(token: str, limit: int) -> None:
    short = label(token, limit)
    assert short and columns(short) <= limit
    assert short.isprintable()
    assert "<" not in html_label(token)


@pytest.mark.parametrize("token", ["中国", "\U00012345"])
def test_fonts_that_the_machine_has(token: str, tmp_path: Path) -> None:
    """With a font that has its characters a token is drawn; on a machine without one it is escaped. In every format."""
    from matplotlib import font_manager

    from murano.plotting import fonts
    from murano.plotting.files import figure_bytes
    from murano.plotting.lens import lens_grid

    escaped = "".join(f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}" for char in token)
    lens = make_lens(words=[token, "a"], k=2, positions=3)

    def drawn() -> tuple[set[str], str]:
        """The texts in the cells, and the figure as SVG."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # matplotlib's: a glyph is missing
            ax = lens_grid(lens).draw(bare=True)
            _, svg, _ = (figure_bytes(ax, file_format) for file_format in ("png", "svg", "pdf"))
        return {text.get_text() for text in ax.texts}, svg.decode("utf-8")

    entries = list(font_manager.fontManager.ttflist)
    try:
        font_manager.fontManager.ttflist[:] = [entry for entry in entries if entry.name.startswith("DejaVu")]
        assert fonts.label(token) == escaped
        texts, svg = drawn()
        assert texts == {escaped, "a"} and escaped in svg
        font_manager.fontManager.addfont(boxes(token, tmp_path / "test.ttf"))
        assert fonts.label(token) == token and fonts.families([token, "a"])[-1] == "Murano Test"
        assert fonts.width(token) == pytest.approx(0.6 * len(token), abs=1e-3)
        texts, svg = drawn()
        assert texts == {token, "a"} and token in svg and "Murano Test" in svg
    finally:
        font_manager.fontManager.ttflist[:] = entries
    assert fonts.label(token) in (token, escaped)


def boxes(chars: str, path: Path) -> Path:
    """A font that draws these characters as boxes."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for point in ((0, 500), (500, 500), (500, 0)):
        pen.lineTo(point)
    pen.closePath()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "box"])
    builder.setupCharacterMap({ord(char): "box" for char in chars})
    builder.setupGlyf({".notdef": pen.glyph(), "box": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (600, 0), "box": (600, 0)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Murano Test", "styleName": "Regular"})
    builder.setupOS2(usWeightClass=400)
    builder.setupPost()
    builder.save(path)
    return path
