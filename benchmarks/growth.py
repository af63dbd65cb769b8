"""Memory and time as one prompt gets longer and as more layers are read: ``python -m benchmarks.growth``.

Beside each stands a plain forward of the same prompt with the last position's logits: what the model itself costs.
Each point is a fresh process; time is the median of a few runs in it, after the memory was taken.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.contenders import forward_alone, model_in_float32
from murano import Prompt
from murano.lens import logit_lens

TOKENS = (512, 1024, 2048, 4096, 8192)
LAYERS = (1, 5, 10, 20, 30)
#: The prompt on which layers grow.
TOKENS_FOR_LAYERS = 1024
LABELS = {"murano": "Murano, top-5 + entropy", "forward": "plain forward, last logits"}


def measure_here(who: str, tokens: int, layers: int, rounds: int) -> dict[str, Any]:
    """One point, in this process, which must be fresh."""
    model = model_in_float32()
    ids = common.token_prompts(model.tokenizer, 1, tokens)
    tiny = [ids[0][:4]]
    forward_alone(1)(model, tiny, "last")()
    common.settle()
    loaded = common.rss()
    # The last layers, so that every point has the whole forward behind it.
    wanted = list(range(model.n_layers - layers, model.n_layers))

    def lens(tokens: list[int]) -> Any:
        return logit_lens(model, [Prompt(token_ids=tuple(tokens))], layers=wanted)

    if who == "murano":
        model.check_readout()
        lens(tiny[0])
        run = lambda: lens(ids[0])  # noqa: E731
    else:
        run = forward_alone(1)(model, ids, "last")
    common.settle()
    ready = common.rss()
    peak, how = common.peak_rss_of(run)
    seconds = [common.timed(run) for _ in range(rounds)]
    return {
        "seconds": seconds,
        "median": common.median(seconds),
        "kept": ready - loaded,
        "peak": peak - ready,
        "how": how,
    }


def measure(who: str, tokens: int, layers: int, rounds: int) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.growth", "--point", who, str(tokens), str(layers), str(rounds)]
    done = subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True)
    point: dict[str, Any] = {"who": who, "tokens": tokens, "layers": layers}
    if done.returncode != 0:
        return point | {"failed": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    print(f"  {who}: {tokens} tokens, {layers} layers", file=sys.stderr, flush=True)
    return {**point, **json.loads(done.stdout.strip().splitlines()[-1])}


def table_of(data: dict[str, Any]) -> str:
    """Both tables as Markdown."""
    parts = []
    for title, kind in (("One prompt gets longer, all layers", "tokens"), ("More layers are read", "layers")):
        rows = []
        for value in data["sizes"][kind]:
            both = {p["who"]: p for p in data[kind] if p[kind] == value}
            row = [str(value)]
            for key, scale in (("median", 1.0), ("peak", common.MB)):
                for who in LABELS:
                    point = both.get(who, {})
                    row.append(f"{point[key] / scale:.3g}" if key in point else "failed")
            rows.append(row)
        header = [kind, "Murano s", "forward s", "Murano peak MB", "forward peak MB"]
        note = f" ({data['tokens_for_layers']} tokens)" if kind == "layers" else ""
        parts.append(f"### {title}{note}\n\n{common.markdown_table(header, rows)}")
    return "\n\n".join([*parts, common.machine_line(data["machine"])])


def draw(data: dict[str, Any], file: Path) -> None:
    """Time and memory over tokens, and over layers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    for column, kind in zip(figure.subplots(2, 2).T, ("tokens", "layers"), strict=True):
        for axis, key, scale, unit in zip(
            column, ("median", "peak"), (1.0, common.MB), ("seconds", "peak MB"), strict=True
        ):
            for who, label in LABELS.items():
                points = [p for p in data[kind] if p["who"] == who and key in p]
                axis.plot([p[kind] for p in points], [p[key] / scale for p in points], marker="o", label=label)
            axis.set_ylim(bottom=0)
            axis.set_xlabel(f"{kind} read" if kind == "layers" else "tokens in the prompt", fontsize=8)
            axis.set_ylabel(unit, fontsize=8)
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(file, dpi=130)


def numbers(text: str) -> list[int]:
    """``"512,1024"`` → ``[512, 1024]``."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure everything and write it down."""
    if sys.argv[1:2] == ["--point"]:
        who, *sizes = sys.argv[2:6]
        print(json.dumps(measure_here(who, *map(int, sizes))))
        return
    parser = common.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=numbers, default=",".join(map(str, TOKENS)))
    parser.add_argument("--layers", type=numbers, default=",".join(map(str, LAYERS)))
    parser.add_argument("--tokens-for-layers", type=int, default=TOKENS_FOR_LAYERS)
    asked = parser.parse_args()
    if asked.rounds < 1:
        parser.error("--rounds must be at least 1")
    if asked.quick:
        asked.rounds, asked.tokens, asked.layers, asked.tokens_for_layers = 1, [8, 16], [1, 2], 8
    layers = max(LAYERS)
    data: dict[str, Any] = {
        "benchmark": "growth",
        "machine": common.machine(),
        "rounds": asked.rounds,
        "sizes": {"tokens": asked.tokens, "layers": asked.layers},
        "tokens_for_layers": asked.tokens_for_layers,
    }
    data["tokens"] = [measure(who, n, layers, asked.rounds) for n in asked.tokens for who in LABELS]
    data["layers"] = [measure(who, asked.tokens_for_layers, n, asked.rounds) for n in asked.layers for who in LABELS]
    common.Output("growth", asked.out, keep=not asked.quick).write(data, table_of(data), draw)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
