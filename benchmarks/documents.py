"""A sweep over all layers as a document beside the same lens called directly: ``python -m benchmarks.documents``.

A hundred rows, their last position, the probability of the answer in each of the thirty layers. The document writes its folder, one point
for each layer; the lens has its targets and returns its artifact.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.contenders import model_in_float32
from murano import MuranoModel, documents, logit_lens, shipped_prompts

ROWS, ROUNDS = 100, 7


def sweep(rows: int) -> documents.Document:
    """The experiment as a document: its rows stand in it, so that both read the same prompts."""
    chosen = list(shipped_prompts("facts"))[:rows]
    return documents.load(
        {
            "header": {"description": "The probability of the answer, layer by layer"},
            "model": {"key": "bundled", "dtype": "fp32"},
            "roles": {"base": {"field": "prompt", "answers": "continued"}},
            "sites": {"resid": {"component": "block_output", "layers": {"sweep": "all"}}},
            "interventions": {
                "lens": {
                    "reads": {"lens": {"site": "resid", "pos": -1, "input": "base", "view": "logits"}},
                    "metrics": {"p_answer": {"kind": "token_prob", "of": "lens", "token": "target"}},
                }
            },
            "steps": {
                "lens": {
                    "kind": "observe",
                    "interventions": "lens",
                    "rows": {"base": [{"prompt": p.text, "target": p.targets[0]} for p in chosen]},
                    "saves": [{"value": "p_answer", "file_path": "p_answer.json"}],
                }
            },
        }
    )


def measure(model: MuranoModel, rows: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of both, in rounds in which they take turns."""
    document = sweep(rows)
    prompts = list(shipped_prompts("facts"))[:rows]
    runs = {
        "lens": lambda folder: logit_lens(model, prompts, positions="last"),
        "document": lambda folder: document.run(out=folder, model=model),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            with tempfile.TemporaryDirectory() as folder:
                took = common.timed(lambda run=run, folder=folder: run(Path(folder) / "out"))  # type: ignore[misc]
            if number:  # the first round warms up
                seconds[name].append(took)
    return seconds


def table(data: dict[str, Any]) -> str:
    """As text."""
    seconds = data["seconds"]
    ratios = [a / b for a, b in zip(seconds["document"], seconds["lens"], strict=True)]
    row = [
        str(data["rows"]),
        *(f"{common.median(seconds[name]):.2f}" for name in ("document", "lens")),
        f"{common.median(ratios):.2f}",
        f"{min(ratios):.2f} – {max(ratios):.2f}",
    ]
    header = ["rows", "document, s", "logit_lens, s", "ratio", "min – max"]
    return f"{common.markdown_table(header, [row])}\n\n{common.machine_line(data['machine'])}"


def main() -> None:
    """Measure and write."""
    parser = common.options(__doc__ or "")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds that are counted")
    given = parser.parse_args()
    rows, rounds = (4, 1) if given.quick else (given.rows, given.rounds)
    model = model_in_float32()
    model.check_readout()
    data = {"machine": common.machine(), "rows": rows, "seconds": measure(model, rows, rounds)}
    common.Output("documents", given.out, keep=not given.quick).write(data, table(data), None)


if __name__ == "__main__":
    main()
