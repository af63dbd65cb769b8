"""How long figures of a long prompt take, and how large the page is: ``python -m benchmarks.figures``.

One prompt of 128 tokens, all thirty layers; the overview is of 500 prompts. Figures are drawn, saved as PNG and closed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.contenders import model_in_float32
from murano import logit_lens, shipped_prompts

TOKENS, SET, ROUNDS = 128, 500, 7


def save(ax: Any, file: Path) -> None:
    """To a file, and closed."""
    import matplotlib.pyplot as plt

    from murano.plotting import save_figure

    save_figure(ax, file)
    plt.close(ax.figure)


def measure(tokens: int, prompts: int, rounds: int) -> dict[str, Any]:
    """Seconds of each figure, sizes of what was written, and memory over a hundred figures."""
    from murano.plotting import lens_page, plot_lens, plot_overview, plot_trajectories

    model = model_in_float32()
    long = logit_lens(model, common.token_prompts(model.tokenizer, 1, tokens))
    facts = list(shipped_prompts("facts"))
    many = logit_lens(model, (facts * (prompts // len(facts) + 1))[:prompts], positions="last")
    draws: dict[str, Callable[[Path], Any]] = {
        f"plot_lens, {model.n_layers} × {tokens}": lambda file: save(plot_lens(long), file),
        f"plot_lens, no column left out, {model.n_layers} × {tokens}": lambda file: save(
            plot_lens(long, max_columns=tokens), file
        ),
        "plot_trajectories": lambda file: save(plot_trajectories(long), file),
        f"plot_overview, {prompts} prompts": lambda file: save(plot_overview(many), file),
        f"lens_page, {model.n_layers} × {tokens}": lambda file: lens_page(long, file.with_suffix(".html")),
    }
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, draw in draws.items():
            file = Path(folder) / "figure.png"
            draw(file)  # fonts are found once
            seconds = [common.timed(lambda draw=draw, file=file: draw(file)) for _ in range(rounds)]  # type: ignore[misc]
            (written,) = Path(folder).iterdir()
            found[name] = {"seconds": seconds, "bytes": written.stat().st_size}
            written.unlink()
        common.settle()
        before = common.rss()
        for _ in range(100):
            save(plot_trajectories(long), Path(folder) / "figure.png")
        common.settle()
        grown = common.rss() - before
    return {"figures": found, "grown_over_100": grown}


def table(data: dict[str, Any]) -> str:
    """As text."""
    rows = [
        [name, f"{common.median(of['seconds']):.2f}", f"{max(of['seconds']):.2f}", f"{of['bytes'] / 1e3:.0f}"]
        for name, of in data["figures"].items()
    ]
    head = common.markdown_table(["figure", "seconds", "slowest of all", "file, kB"], rows)
    said = f"A hundred figures, one after another: {data['grown_over_100'] / common.MB:+.0f} MB."
    return f"{head}\n\n{said}\n\n{common.machine_line(data['machine'])}"


def main() -> None:
    """Measure and write."""
    parser = common.options(__doc__ or "")
    given = parser.parse_args()
    sizes = (8, 10, 1) if given.quick else (TOKENS, SET, ROUNDS)
    data = {"machine": common.machine(), **measure(*sizes)}
    common.Output("figures", given.out, keep=not given.quick).write(data, table(data), None)


if __name__ == "__main__":
    main()
