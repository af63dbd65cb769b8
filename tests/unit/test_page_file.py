"""The page as a file: its data are the lens's numbers bit for bit, its tokens harmless, its errors clear. No browser."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.lenses import NASTY, make_lens

from murano import keys, load_run
from murano.errors import ArtifactError, InputError
from murano.plotting import lens_page
from murano.plotting import page as page_module
from murano.plotting.labels import label
from murano.plotting.table import STRONGEST
from murano.prompts import Prompt, PromptBatch
from murano.results import Results
from murano.steps.plot import Plot

ROOT = Path(__file__).parents[2]


def data_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    found: dict[str, Any] = json.loads(text)
    return found


def array(text: str, dtype: str, *shape: int) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype).reshape(shape)


def test_the_data_are_those_of_the_lens() -> None:
    lens = make_lens(layers=4, prompts=3, positions=6, k=3, lengths=[6, 2, 4])
    lens = dataclasses.replace(
        lens, stats={"kl": lens.entropy * 2, "of_a_prompt": torch.zeros(3)}, notes=("odd: $1 < $2",)
    )
    data = data_of(lens_page(lens))
    assert (data["k"], data["layers"], data["final"], data["leftOut"]) == (3, ["0", "1", "2", "3"], True, 0)
    assert data["stats"] == [["entropy", "entropy (nats)"], ["kl", "KL divergence (nats)"]]
    assert data["notes"] == ["odd: $1 < $2"]
    words = dict(zip(data["ids"], data["words"], strict=True))
    assert words == {token: label(lens.words[token]) for token in words}
    for prompt, shown in enumerate(data["prompts"]):
        n = int(lens.attention_mask[prompt].sum())
        assert shown["positions"] == list(range(n))
        assert [data["ids"][token] for token in shown["tokens"]] == lens.input_ids[prompt, -n:].tolist()
        ids = np.array([*data["ids"], -1])[array(shown["top"], "<u2", 4, n, 3)]
        assert np.array_equal(ids, lens.top_ids[:, prompt, -n:].numpy())
        assert np.array_equal(array(shown["probs"], "<f4", 4, n, 3), lens.top_probs[:, prompt, -n:].numpy())
        for number, values in zip(shown["stats"], (lens.entropy, lens.stats["kl"]), strict=True):
            assert np.array_equal(array(number, "<f4", 4, n), values[:, prompt, -n:].numpy())


def test_layers_go_as_the_data_flows() -> None:
    lens = make_lens(layers=3)
    turned = dataclasses.replace(
        lens, addresses=lens.addresses[::-1], top_ids=lens.top_ids.flip(0), top_probs=lens.top_probs.flip(0),
        entropy=lens.entropy.flip(0),
    )  # fmt: skip
    assert data_of(lens_page(turned)) == data_of(lens_page(lens))


def test_tokens_are_harmless() -> None:
    lens = make_lens(words=NASTY, positions=len(NASTY), k=5)
    page = lens_page(dataclasses.replace(lens, model={"model_id": "</script>{{data}}\u2028\ud800"}))
    assert page.count("</script") == 2 and page.count("<script") == 2 and page.isascii() is False
    (text,) = re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert text.isascii() and not set("<>&") & set(text)
    assert data_of(page)["words"] == [label(word) for word in NASTY]
    page.encode("utf-8")


def test_it_loads_nothing() -> None:
    page = lens_page(make_lens())
    assert "default-src 'none'" in page
    addresses = set(re.findall(r"https?://[^\s\"']+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of a language, not a place"
    assert not re.search(r"\b(fetch|XMLHttpRequest|import)\b\s*\(|@import|url\(", page)
    assert "innerHTML" not in page, "texts go in as texts"


def test_prompts_are_chosen() -> None:
    lens = make_lens(prompts=4)
    assert [prompt["index"] for prompt in data_of(lens_page(lens, prompts=[2, -4, 2]))["prompts"]] == [2, 0]
    assert [prompt["index"] for prompt in data_of(lens_page(lens, prompts=1))["prompts"]] == [1]
    for wrong, message in (
        (4, "Prompt 4 does not exist: there are 4, counted from 0"),
        ("a", "A prompt is given by its index, not by 'a'"),
        ([], "prompts is empty"),
    ):
        with pytest.raises(InputError, match=message):
            lens_page(lens, prompts=wrong)
    with pytest.raises(InputError, match="LogitLensResult is needed, not Results"):
        lens_page(Results())  # type: ignore[arg-type]


def test_a_page_stays_small_enough_for_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = make_lens(layers=4, prompts=5, positions=5, k=3)
    monkeypatch.setattr(page_module, "MOST_KEPT", 2 * 4 * 5 * 3)
    data = data_of(lens_page(lens))
    assert len(data["prompts"]) == 2 and data["leftOut"] == 3
    assert len(data_of(lens_page(lens, prompts=range(5)))["prompts"]) == 5, "what was asked for by name is there"
    monkeypatch.setattr(page_module, "MOST_KEPT", 1)
    assert len(data_of(lens_page(lens))["prompts"]) == 1


def test_the_file_is_the_page(tmp_path: Path) -> None:
    lens = make_lens()
    path = tmp_path / "new" / "lens.html"
    page = lens_page(lens, path)
    assert path.read_bytes().decode("utf-8") == page == lens_page(lens)
    assert isinstance(page, str)
    assert repr(page) == f"<a page of {len(page) / 1000:.0f} kB: lens_page(lens, 'lens.html') writes it to a file>"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="Can't write the page"):
        lens_page(lens, tmp_path / "file" / "lens.html")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "h/a.png",
            "'h/a.png' is no name of a page: write 'h/a.html'. For an image: save_figure(plot_lens(lens), 'h/a.png').",
        ),
        ("x.txt", "'x.txt' is no name of a page: write 'x.html'."),
        ("x", "'x' is no name of a page: write 'x.html'."),
        (b"x.html", "b'x.html' is no path: write a string or a Path, such as 'lens.html'."),
        ("", "'' is no path: write a string or a Path, such as 'lens.html'."),
    ],
)
def test_a_page_is_written_under_a_name_of_a_page(
    path: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        lens_page(make_lens(), path)
    assert str(error.value) == message and not list(tmp_path.iterdir())
    assert lens_page(make_lens(), "a.HTM") and [file.name for file in tmp_path.iterdir()] == ["a.HTM"]


def test_prompts_go_by_what_was_typed() -> None:
    texts = ["东京是日本的首都", "line\none", "مرحبا \u202ebc", "a " * 99, ""]
    prompts = [Prompt(text=text) for text in texts[:4]]
    prompts += [Prompt(token_ids=(0, 1)), Prompt(messages=({"role": "user", "content": "Hi · there"},))]
    lens = dataclasses.replace(make_lens(prompts=6, positions=2), prompts=PromptBatch(prompts))
    names = [prompt["name"] for prompt in data_of(lens_page(lens))["prompts"]]
    assert names == [
        texts[0], r"line\none", r"مرحبا \u202ebc", "a " * 39 + "a…", " Paris London", "Hi · there",
    ]  # fmt: skip


def test_a_prompt_that_was_left_out_is_not_on_the_page() -> None:
    lens = make_lens(prompts=3, lengths=[0, 5, 3])
    data = data_of(lens_page(lens))
    assert [prompt["index"] for prompt in data["prompts"]] == [1, 2] and data["leftOut"] == 0
    assert data_of(lens_page(lens, prompts=[2]))["leftOut"] == 0, "those that were not asked for are not too many"
    text = lens._repr_html_()
    assert text is not None and "Prompt 1 of 3." in text
    with pytest.raises(InputError, match=r"There is nothing to draw: Prompt 0 was left out\."):
        lens_page(make_lens(lengths=[0]))


def test_a_saved_run_has_its_page() -> None:
    lens = load_run(ROOT / "tests/data/run_v1")[keys.LOGIT_LENS]
    data = data_of(lens_page(lens))
    assert data["layers"] == ["embeddings", "0", "1"] and ["rank", "rank of the target (1 = first)"] in data["stats"]
    assert data["prompts"][0]["name"] == "The capital of France"
    assert data["prompts"][1]["name"] == "日本"


def test_plot_writes_one_page_for_all_prompts(tmp_path: Path) -> None:
    results = Results()
    results[keys.LOGIT_LENS] = make_lens(prompts=12, positions=3)
    results["other"] = make_lens()
    Plot(tmp_path, formats=("html",))(results)
    assert results[keys.PLOTS] == [f"{tmp_path}/logit_lens.html", f"{tmp_path}/other.html"]
    assert len(data_of((tmp_path / "logit_lens.html").read_text("utf-8"))["prompts"]) == 12
    Plot(tmp_path, formats=(".HTML", "svg"))(results)
    assert [Path(file).name for file in results[keys.PLOTS]] == [
        *("logit_lens_overview.svg", "logit_lens.html", "other.svg", "other.html")
    ]
    with pytest.raises(InputError, match="Unknown format 'htm'. Did you mean 'html'. Known: png, svg, pdf, html"):
        Plot(formats="htm").check()


def test_a_notebook_shows_the_page_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython
    import IPython.display

    shown: list[Any] = []
    monkeypatch.setattr(IPython, "get_ipython", lambda: type("Shell", (), {"kernel": object()})())
    monkeypatch.setattr(IPython.display, "display", shown.append)
    results = Results()
    results[keys.LOGIT_LENS] = make_lens()
    Plot(formats="html")(results)
    assert [type(thing).__name__ for thing in shown] == ["Page"]
    frame = shown[0]._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and 'sandbox="allow-scripts"' in frame
    assert frame.count("<iframe") == frame.count("</iframe>") == 1 and "<script" not in frame
    _, fallback = frame.split("</iframe>")
    assert "To see the page here, trust this notebook or run the cell" in fallback
    assert fallback.count("<tr") == 6 and "lens_page" not in fallback


# -- what a notebook shows of a lens -----------------------------------------------------------------------------


def test_a_lens_shows_itself_small() -> None:
    lens = make_lens(layers=80, prompts=2, positions=128, k=10, words=NASTY)
    text = lens._repr_html_()
    assert text is not None and len(text) < 80_000
    assert text.count("<tr") == 34 and text.count("<td") == 34 * 8
    assert not re.search(r"<(script|style|iframe)|\bid=|\bclass=", text)
    assert "The last 8 of 128 tokens." in text and "32 of 80 layers." in text and "Prompt 0 of 2." in text
    names = re.findall(r"<th[^>]*>(.*?)</th>", text)
    assert names[0] == "answer" and names[-1] == "token" and names[1] == "79" and names[-2] == "0"


def test_the_small_table_has_the_numbers_of_the_lens() -> None:
    lens = make_lens(layers=2, positions=2)
    lens.top_ids[0, 0, 1], lens.top_probs[0, 0, 1] = -1, float("nan")
    text = lens._repr_html_()
    assert text is not None
    cells = re.findall(r'rgba\(70,140,210,(.*?)\)" title="(.*?)">(.*?)<', text)
    upper = [(lens.predicted_words[1][0][c], float(lens.max_probs[1, 0, c])) for c in range(2)]
    for (alpha, hint, word), (expected, prob) in zip(cells[:2], upper, strict=True):
        assert word == label(expected) and hint.startswith(f"{word}  {prob:.3f}&#10;")
        assert float(alpha) == pytest.approx(prob * STRONGEST, abs=0.006)
    assert cells[3] == ("0.00", "", "–")


def test_an_empty_lens_has_no_table() -> None:
    lens = make_lens(positions=1)
    empty = dataclasses.replace(lens, top_ids=lens.top_ids[:, :0], top_probs=lens.top_probs[:, :0])
    assert empty._repr_html_() is None


def test_neither_needs_matplotlib() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from murano import load_run\n"
        "from murano.plotting import lens_page\n"
        "lens = load_run('tests/data/run_v1')['logit_lens']\n"
        "assert '<table' in lens._repr_html_() and '<!doctype html>' in lens_page(lens)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
