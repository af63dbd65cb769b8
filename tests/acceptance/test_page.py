"""The page in a browser: what is seen, what a hand or a key does, and that nothing is asked of a network."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page, expect
from support.browser import chromium as chromium  # a fixture
from support.lenses import NASTY, make_lens

from murano.artifacts.logit_lens import LogitLensResult
from murano.plotting import lens_page
from murano.plotting.labels import label
from murano.prompts import Prompt, PromptBatch

Open = Callable[..., Page]
#: The contrast (WCAG 2) of each cell's text with its ground, through a canvas that knows every notation of colours.
CONTRASTS = """() => {
  const context = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const luminance = colour => {
    context.clearRect(0, 0, 1, 1); context.fillStyle = colour; context.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map(x => x / 255)
      .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  return [...document.querySelectorAll("tbody td:not(.none), thead td, tfoot td")].map(td => {
    const style = getComputedStyle(td), pair = [luminance(style.color), luminance(style.backgroundColor)];
    return Math.max(...pair) / Math.min(...pair);
  });
}"""

#: How strong each cell is shaded, in percent, negative in the other colour.
PARTS = """rows => rows.map(row => [...row.cells].slice(1).map(td => (td.classList.contains("minus") ? -0.5 : 0.5) *
  (parseFloat(td.style.getPropertyValue("--part")) + parseFloat(td.style.getPropertyValue("--more")))))"""


@pytest.fixture
def show(chromium: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens the page of a lens from the disk; in the end, nothing went wrong in it and nothing else was loaded."""
    contexts, complaints, requests = [], [], []

    def opened(lens: LogitLensResult, **options: Any) -> Page:
        file = tmp_path / "lens.html"
        lens_page(lens, file)
        contexts.append(
            chromium.new_context(**{"viewport": {"width": 1280, "height": 800}, "offline": True, **options})
        )
        page = contexts[-1].new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
    assert all(re.match("file:.*/lens.html$", url) or url.startswith("data:") for url in requests), requests


def grid(page: Page) -> list[list[str]]:
    """The texts of the cells, layer 0 first."""
    rows = page.eval_on_selector_all("tbody tr", "rows => rows.map(r => [...r.cells].slice(1).map(c => c.textContent))")
    return rows[::-1]


def cell(page: Page, layer: int, column: int) -> Any:
    return page.locator("tbody tr").nth(-1 - layer).locator("td").nth(column)


def marked(page: Page, name: str) -> set[tuple[int, int]]:
    """Layer and column of the cells in the grid that carry a class."""
    return {
        tuple(at) for at in page.eval_on_selector_all(f"tbody td.{name}", "tds => tds.map(td => [td.row, td.column])")
    }


def ranks(lens: LogitLensResult, token: int, prompt: int, column: int) -> list[int]:
    """The rank of a token at each layer, 0 where it is not among those kept."""
    kept = lens.top_ids[:, prompt, column].tolist()
    return [ids.index(token) + 1 if token in ids else 0 for ids in kept]


def test_the_grid_holds_what_each_layer_predicts(show: Open) -> None:
    lens = make_lens(layers=5, prompts=2, positions=6, lengths=[6, 4])
    page = show(lens)
    assert page.title() == "Logit lens: org/model_$1$"
    assert grid(page) == [[label(word) for word in lens.predicted_words[layer][0]] for layer in range(5)]
    assert page.locator("tbody th").all_text_contents() == ["4", "3", "2", "1", "0"], "layer 0 is at the bottom"
    assert page.locator("tfoot td").all_text_contents() == [label(word) for word in lens.input_words[0]]
    assert page.locator("thead td").all_text_contents() == grid(page)[-1]
    settled = marked(page, "settled")
    for column in range(6):
        ids = lens.predicted_tokens[:, 0, column].tolist()
        first = next(layer for layer in range(5) if set(ids[layer:]) == {ids[-1]})
        assert (first, column) in settled
    assert len(settled) == 6


def test_a_hand_over_a_cell_shows_the_top_k(show: Open) -> None:
    lens = make_lens(k=4)
    page = show(lens)
    cell(page, 1, 2).hover()
    expect(page.locator("#where")).to_have_text("layer 1 after token 2, ·the")
    assert page.locator("#top bdi").all_text_contents() == [label(word) for word in lens.top_words[1][0][2]]
    for text, prob in zip(page.locator("#top span").all_text_contents(), lens.top_probs[1, 0, 2].tolist(), strict=True):
        assert float(text) == pytest.approx(prob, rel=5e-3)
    shown = dict(zip(page.locator("dt").all_text_contents(), page.locator("dd").all_text_contents(), strict=True))
    assert float(shown["entropy (nats)"]) == pytest.approx(float(lens.entropy[1, 0, 2]), rel=5e-3)
    final = int(lens.predicted_tokens[-1, 0, 2])
    assert shown["rank of the final prediction"] == str(ranks(lens, final, 0, 2)[1] or "below the top 4")
    page.locator("#title").hover()
    expect(page.locator("#where")).to_have_text("layer 3 after token 4, ·Rome")  # where the keyboard is


def test_a_click_follows_a_token_through_depth(show: Open) -> None:
    lens = make_lens(layers=6, k=3)
    page = show(lens)
    cell(page, 0, 3).click()
    token = int(lens.predicted_tokens[0, 0, 3])
    found = ranks(lens, token, 0, 3)
    expect(page.locator("#followed")).to_have_text(f"{label(lens.words[token])} after token 3, ·a")
    assert marked(page, "followed") == {(layer, 3) for layer, rank in enumerate(found) if rank}
    assert marked(page, "first") == {(layer, 3) for layer, rank in enumerate(found) if rank == 1}
    told = page.locator("#chart title").all_text_contents()
    for layer, (text, rank) in enumerate(zip(told, found, strict=True)):
        if not rank:
            assert text == f"layer {layer}: below the top 3"
            continue
        prob = float(lens.top_probs[layer, 0, 3, rank - 1])
        assert text.endswith(f", rank {rank}")
        assert float(text.split()[2].strip(",")) == pytest.approx(prob, rel=5e-3)
    assert page.locator("#chart .out").count() == found.count(0)
    assert page.locator("#chart .dot").count() == 2 * (6 - found.count(0)), (
        "in the curve of ranks and in that of probabilities"
    )
    # A token of the panel, and an end of a column.
    page.locator("#top button").nth(2).click()
    second = int(lens.top_ids[0, 0, 3, 2])
    expect(page.locator("#followed bdi").first).to_have_text(label(lens.words[second]))
    page.locator("tfoot td").nth(1).click()
    expect(page.locator("#followed bdi").first).to_have_text(label(lens.predicted_words[-1][0][1]))
    page.locator("#chart .slot").nth(2).click()
    assert page.evaluate("[document.activeElement.row, document.activeElement.column]") == [2, 1]


def test_search_rings_the_cells_that_have_a_token(show: Open) -> None:
    lens = make_lens(layers=6, positions=8, k=3)
    page = show(lens)

    def having(*words: str) -> set[tuple[int, int]]:
        top = lens.top_words.tolist()
        return {(layer, c) for layer in range(6) for c in range(8) if set(words) & set(top[layer][0][c])}

    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("Paris")  # " Paris" is meant
    hits = having(" Paris")
    assert hits and marked(page, "found") == hits
    leads = {(layer, c) for layer, c in hits if lens.predicted_words[layer][0][c] == " Paris"}
    assert marked(page, "lead") == leads
    first = min(layer for layer, _ in hits)
    expect(page.locator("#found")).to_have_text(f"in the top 3 of {len(hits)} cells, first at layer {first}")
    in_turn = sorted(hits, key=lambda hit: hit[::-1], reverse=True)
    assert in_turn[0] == (5, 7), "where the page begins"
    for place in in_turn[1:] + in_turn[:1]:
        page.keyboard.press("Enter")
        assert page.evaluate("[at.row, at.column]") == list(place)
    page.fill("#search", "on")  # part of " London" alone
    assert marked(page, "found") == having(" London")
    page.fill("#search", "e")
    assert marked(page, "found") == having(" the", " Rome", "The", " E", "el", " Tower")
    page.fill("#search", "Berlin")
    assert marked(page, "found") == set()
    expect(page.locator("#found")).to_have_text("in no top 3 of this prompt")
    page.keyboard.press("Escape")
    expect(page.locator("#found")).to_have_text("")
    assert page.evaluate("document.activeElement.tagName") == "TD"


def test_prompts_are_switched(show: Open) -> None:
    lens = make_lens(prompts=3, positions=6, lengths=[6, 3, 5])
    page = show(lens)
    assert page.locator("#prompt option").all_text_contents()[1] == "1: \u2068 Paris London the\u2069"
    page.select_option("#prompt", "1")
    assert grid(page) == [[label(word) for word in lens.predicted_words[layer][1][3:]] for layer in range(4)]
    expect(page.locator("#where")).to_have_text("layer 3 after token 2, ·the")
    page.locator("tbody td").first.focus()
    page.keyboard.press("]")
    assert len(grid(page)[0]) == 5
    page.keyboard.press("]")  # there is no further one
    page.keyboard.press("[")
    assert len(grid(page)[0]) == 3
    assert show(make_lens()).locator("#prompts").is_hidden()


def test_statistics_are_switched(show: Open) -> None:
    lens = make_lens(layers=5, positions=6, k=3)
    gap, rank = lens.entropy - float(lens.entropy.mean()), (lens.entropy * 40).round() + 1
    lens = dataclasses.replace(lens, stats={"target_gap": gap, "rank": rank})
    page = show(lens)
    assert page.locator("#stat option").all_text_contents() == [
        *("probability of the prediction", "probability of the final prediction", "rank of the final prediction"),
        *("entropy (nats)", "target gap", "rank of the target (1 = first)"),
    ]

    def parts() -> torch.Tensor:
        rows = page.eval_on_selector_all("tbody tr", PARTS)
        return torch.tensor(rows[::-1]) / 100

    def chosen(name: str) -> torch.Tensor:
        page.select_option("#stat", label=name)
        return parts()

    close = {"atol": 6e-4, "rtol": 0}
    torch.testing.assert_close(parts(), lens.max_probs[:, 0], **close)
    entropy = lens.entropy[:, 0]
    low = float(entropy.min()) if entropy.min() >= 0.5 * entropy.max() else 0.0
    torch.testing.assert_close(chosen("entropy (nats)"), (entropy - low) / (entropy.max() - low), **close)
    torch.testing.assert_close(chosen("target gap"), gap[:, 0] / gap.abs().max(), **close)
    torch.testing.assert_close(
        chosen("rank of the target (1 = first)"), 1 - 0.9 * rank[:, 0].log() / rank.max().log(), **close
    )
    final = lens.predicted_tokens[-1, 0].tolist()
    kept = torch.tensor([ranks(lens, token, 0, column) for column, token in enumerate(final)]).T
    shown = chosen("rank of the final prediction")
    assert torch.equal(shown == 0, kept == 0), "a rank that was kept has a colour, others none"
    assert marked(page, "none") == {(int(row), int(column)) for row, column in (kept == 0).nonzero()}
    probs = chosen("probability of the final prediction")
    torch.testing.assert_close(probs[-1], lens.max_probs[-1, 0], **close)
    expect(page.locator("#unit")).to_have_text("probability of the final prediction; empty where it is below the top 3")


def test_the_keyboard_is_enough(show: Open) -> None:
    lens = make_lens(layers=4, positions=6)
    page = show(lens)

    def where() -> list[int]:
        return page.evaluate("[document.activeElement.row, document.activeElement.column]")

    for _ in range(10):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "TD":
            break
    assert where() == [3, 5], "one stop of the tab key for the whole grid: where the answer is"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    assert where() == [2, 4]
    expect(page.locator("#where")).to_have_text("layer 2 after token 4, ·Rome")
    page.keyboard.press("Enter")
    expect(page.locator("#followed bdi").first).to_have_text(label(lens.predicted_words[2][0][4]))
    page.keyboard.press("Home")
    assert where() == [2, 0]
    for key, place in (("ArrowLeft", [2, 0]), ("PageDown", [-1, 0]), ("PageUp", [4, 0])):
        page.keyboard.press(key)
        assert where() == place
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('#top') !== null"), "the tokens of the cell come next"
    assert page.locator("td[tabindex='0']").count() == 1
    assert page.locator("td[aria-selected]").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_is_legible_in_both_themes(show: Open, scheme: str) -> None:
    lens = make_lens(layers=30, positions=20)
    lens.top_probs[:, 0, :, 0] = torch.linspace(0, 1, 600).reshape(30, 20)
    lens = dataclasses.replace(lens, stats={"signed": torch.linspace(-1, 1, 600).reshape(30, 1, 20)})
    page = show(lens, color_scheme=scheme)
    for name in ("probability of the prediction", "entropy (nats)", "signed"):
        page.select_option("#stat", label=name)
        assert min(page.evaluate(CONTRASTS)) >= 4.5
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert before == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 29)"}[scheme]
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert min(page.evaluate(CONTRASTS)) >= 4.5
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == before


def test_a_phone(show: Open) -> None:
    lens = make_lens(layers=12, positions=40, prompts=2)
    page = show(lens, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "only the table scrolls sideways"
    box = cell(page, 6, 39).bounding_box()
    assert box["height"] >= 43 and box["width"] >= 43
    for control in ("#prompt", "#stat", "#search", "#theme"):
        assert page.locator(control).bounding_box()["height"] >= 43
    cell(page, 6, 38).tap()
    expect(page.locator("#where")).to_contain_text("layer 6 after token 38")
    expect(page.locator("#followed bdi").first).to_have_text(label(lens.predicted_words[6][0][38]))


def test_nasty_tokens(show: Open) -> None:
    n = len(NASTY)
    lens = make_lens(words=NASTY, positions=n, layers=3, k=n)
    lens.top_ids[1, 0, :, 0] = torch.arange(n)
    page = show(dataclasses.replace(lens, model={"model_id": "<script>alert(1)</script>", "n_layers": 3}))
    written = [label(word) for word in NASTY]
    assert page.locator("tfoot td").all_text_contents() == written == grid(page)[1]
    assert page.title() == "Logit lens: <script>alert(1)</script>"
    assert page.locator("script").count() == 2, "none came in with a token"
    for word, text in zip(NASTY, written, strict=True):
        page.fill("#search", word if word and not word.strip(" ") else text)
        assert page.locator("tfoot td.found").count() >= 1, text
    for column in range(n):
        cell(page, 1, column).click()
        expect(page.locator("#followed bdi").first).to_have_text(written[column])
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_ids_beyond_two_bytes_and_gaps(show: Open) -> None:
    """More words than two bytes can name, positions that were left out, numbers that are not finite."""
    words = [f"w{i}" for i in range(70_000)]
    lens = make_lens(layers=2, positions=4, prompts=1)
    top = torch.tensor([[[[69_999, 0, 5]] * 4]] * 2)
    top[1, 0, 1] = -1
    lens.words._known.update(enumerate(words))
    lens = dataclasses.replace(lens, top_ids=top, position_index=torch.tensor([[0, 1, 7, 8]]))
    lens.top_probs[1, 0, 1] = float("nan")
    page = show(lens)
    assert grid(page) == [["w69999"] * 4, ["w69999", "–", "w69999", "w69999"]]
    assert page.locator("tbody td.gap").count() == 2
    cell(page, 1, 1).hover()
    expect(page.locator("#top")).to_contain_text("Nothing was predicted here")
    cell(page, 1, 1).click()
    expect(page.locator("#summary")).to_contain_text("Click a cell")


def test_without_the_last_layer_there_is_no_answer(show: Open) -> None:
    page = show(dataclasses.replace(make_lens(), model={"n_layers": 9}))
    assert page.locator("thead td").count() == 0 and marked(page, "settled") == set()
    assert not [text for text in page.locator("#stat option").all_text_contents() if "final" in text]
    page.keyboard.press("Tab")


def test_in_a_notebook_several_live_side_by_side(chromium: Browser) -> None:
    one, other = make_lens(positions=20), make_lens(seed=1, words=NASTY)
    outputs = [lens_page(one)._repr_html_(), lens_page(other)._repr_html_(), one._repr_html_(), other._repr_html_()]
    page = chromium.new_page()
    page.set_content("<!doctype html><p>text of the notebook</p>" + "".join(map(str, outputs)))
    first, second = (frame for frame in page.frames if frame is not page.main_frame)
    for frame, lens in ((first, one), (second, other)):
        frame.wait_for_selector("tbody td")
        texts = frame.locator("tbody tr").first.locator("td").all_text_contents()
        assert texts == [label(word) for word in lens.predicted_words[-1][0]]
    first.locator("tbody td").first.click()
    expect(first.locator("#followed bdi").first).to_have_text(label(one.predicted_words[-1][0][0]))
    assert page.locator("[id]").count() == 0 and page.locator("script, style").count() == 0
    small = page.locator("table").first
    assert small.locator("tr").count() == 6 and small.locator("tr").first.locator("td").count() == 8
    last = small.locator("tr").nth(1).locator("td").last
    assert last.text_content() == label(one.predicted_words[-1][0][-1])
    assert last.get_attribute("title").split("\n")[0] == f"{last.text_content()}  {float(one.max_probs[-1, 0, -1]):.3f}"
    page.close()


def test_in_a_notebook_that_is_not_trusted_the_table_stays(chromium: Browser) -> None:
    lens = make_lens(positions=20)
    output = str(lens_page(lens)._repr_html_())
    page = chromium.new_page()
    page.set_content(output)
    said, small = page.get_by_text("trust this notebook or run the cell"), page.locator("table")
    page.frames[1].wait_for_selector("tbody td")
    expect(said).to_be_hidden()
    expect(small).to_be_hidden()
    page.set_content(re.sub("<iframe.*?</iframe>", "", output, flags=re.DOTALL))  # what sanitising leaves
    expect(said).to_be_visible()
    expect(small).to_be_visible()
    assert small.locator("tr").nth(1).locator("td").last.text_content() == label(lens.predicted_words[-1][0][-1])
    page.close()


def test_a_page_that_is_laid_out_late_opens_at_its_answer(chromium: Browser) -> None:
    page = chromium.new_page()
    page.set_content(f"<div style='display: none'>{lens_page(make_lens(positions=128))._repr_html_()}</div>")
    frame = page.frames[1]
    frame.wait_for_selector("tbody td", state="attached")
    frame.evaluate("grid = document.getElementById('scroll')")
    end = "[grid.scrollLeft, grid.scrollWidth - grid.clientWidth]"
    assert frame.evaluate(end) == [0, 0], "nothing is laid out"
    page.evaluate("document.querySelector('div').style.display = 'block'")
    page.wait_for_timeout(500)
    left, most = frame.evaluate(end)
    assert left > 0 and left == pytest.approx(most, abs=1)
    frame.evaluate("grid.scrollLeft = 0")
    page.set_viewport_size({"width": 700, "height": 600})
    page.wait_for_timeout(500)
    assert frame.evaluate("innerWidth") < 700
    assert frame.evaluate("grid.scrollLeft") == 0, "later the reader scrolls"
    page.close()


def test_prompts_are_listed_as_they_were_typed(show: Open) -> None:
    texts = ["东京是日本的首都", "مرحبا بالعالم", "a\u202eb", "The capital of France"]
    lens = make_lens(prompts=4, positions=3)
    page = show(dataclasses.replace(lens, prompts=PromptBatch([Prompt(text=text) for text in texts])))
    names = page.locator("#prompt option").all_text_contents()
    texts[2] = r"a\u202eb"
    assert names == [f"{number}: \u2068{text}\u2069" for number, text in enumerate(texts)]


def test_a_large_page_is_small_beside_its_data(show: Open) -> None:
    lens = make_lens(layers=30, positions=128, k=10)
    page = show(lens)
    assert page.locator("tbody td").count() == 30 * 128
    html = lens_page(lens)
    (data,) = re.findall(r'id="data">(.*?)</script>', html)
    assert len(html) - len(data) < 60_000
    assert len(data) < 30 * 128 * 10 * 8.1 + 30 * 128 * 5.4 + 10_000, "six bytes for each token kept, in base64"
