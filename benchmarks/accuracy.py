"""How far the lens is from the same readout in float64: ``python -m benchmarks.accuracy``.

The residuals that the lens read (``keep="residuals"``) go through copies of the model's norm and head in float64. Where
the logits of two tokens differ by less than 1e-4 there, float32 may order them either way; such rows are not compared.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks import common
from benchmarks.contenders import has_products, model_in_float32
from murano import MuranoModel, Prompt, lens
from murano.readout.request import PRODUCTS

#: Logits closer than this may change places.
GAP = 1e-4
#: How far a probability may be off.
LIMIT = 2e-5
TOP_K = 5
ROWS = 64


def product_names() -> list[str | None]:
    """The products that can be asked for; ``None`` is what Murano chooses by itself."""
    if not has_products():
        return [None]
    return [None, *(name for name in PRODUCTS if name != "auto")]


class Reference:
    """Norm and head in float64."""

    def __init__(self, model: MuranoModel) -> None:
        hf: Any = model.hf_model
        self.norm = copy.deepcopy(hf.model.norm)
        self.weight, self.eps = self.norm.weight.double(), self.norm.variance_epsilon
        self.head = hf.lm_head.weight.double()

    def __call__(self, rows: Tensor) -> Tensor:
        # transformers' RMS norm casts to float32 whatever it is given, so it is written out here.
        x = rows.double()
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        logits: Tensor = (self.weight * x) @ self.head.T
        return logits


def compare(result: Any, reference: Reference) -> dict[str, Any]:
    """A lens held against the reference, a few rows at a time."""
    rows = result.residuals.flatten(0, 2)
    ids, probs = result.top_ids.flatten(0, 2).long(), result.top_probs.flatten(0, 2)
    entropy = result.entropy.flatten()
    found = {"rows": len(rows), "top1_rows": 0, "top1_equal": 0, "topk_rows": 0, "topk_equal": 0}
    off_probability = off_entropy = 0.0
    for start in range(0, len(rows), ROWS):
        part = slice(start, start + ROWS)
        logits = reference(rows[part])
        best, best_ids = logits.topk(TOP_K + 1, dim=-1)
        gaps = best[:, :-1] - best[:, 1:]
        same = best_ids[:, :TOP_K] == ids[part]
        clear_first, clear_all = gaps[:, 0] > GAP, (gaps > GAP).all(dim=-1)
        found["top1_rows"] += int(clear_first.sum())
        found["top1_equal"] += int((clear_first & same[:, 0]).sum())
        found["topk_rows"] += int(clear_all.sum())
        found["topk_equal"] += int((clear_all & same.all(dim=-1)).sum())
        log_probs = logits.log_softmax(dim=-1)
        theirs = log_probs.gather(-1, ids[part]).exp()
        off_probability = max(off_probability, float((theirs - probs[part]).abs().max()))
        exact_entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        off_entropy = max(off_entropy, float((exact_entropy - entropy[part]).abs().max()))
    passed = found["top1_rows"] == found["top1_equal"] and found["topk_rows"] == found["topk_equal"]
    return {
        **found,
        "max_probability_difference": off_probability,
        "max_entropy_difference": off_entropy,
        "passed": passed and off_probability <= LIMIT,
    }


def table_of(data: dict[str, Any]) -> str:
    """The table as Markdown."""
    rows = []
    for name, found in data["products"].items():
        rows.append(
            [
                name,
                f"{found['top1_equal']} / {found['top1_rows']}",
                f"{found['topk_equal']} / {found['topk_rows']}",
                f"{found['max_probability_difference']:.2g}",
                f"{found['max_entropy_difference']:.2g}",
                "yes" if found["passed"] else "NO",
            ]
        )
    header = [
        "product",
        "same top-1",
        f"same top-{TOP_K}",
        "largest Δ probability",
        "largest Δ entropy",
        "within limits",
    ]
    total = next(iter(data["products"].values()))["rows"]
    note = (
        f"{data['prompts']} × {data['tokens']} tokens: {total} rows. Counted are the rows whose best logits "
        f"differ by more than {GAP:g}; the largest difference of a probability may be {LIMIT:g}."
    )
    return "\n\n".join([common.markdown_table(header, rows), note, common.machine_line(data["machine"])])


def main() -> None:
    """Compare every product and write it down; exit status 1 if one is not within the limits."""
    parser = common.options(__doc__ or "")
    parser.add_argument("--case", type=common.parse_case, default="8x128", help="prompts x tokens")
    parser.add_argument("--layers", type=int, help="only so many, evenly spaced")
    asked = parser.parse_args()
    if asked.quick:
        asked.case, asked.layers = (1, 8), 4
    model = model_in_float32()
    prompts = [Prompt(token_ids=tuple(i)) for i in common.token_prompts(model.tokenizer, *asked.case)]
    layers: Any = "all"
    if asked.layers:
        n = model.n_layers
        layers = sorted({n - 1 - round(i * (n - 1) / max(1, asked.layers - 1)) for i in range(asked.layers)})
    reference = Reference(model)
    data: dict[str, Any] = {
        "benchmark": "accuracy",
        "machine": common.machine(),
        "prompts": asked.case[0],
        "tokens": asked.case[1],
        "products": {},
    }
    for name in product_names():
        options: dict[str, Any] = {} if name is None else {"product": name}
        result = lens.logit_lens(model, prompts, layers=layers, top_k=TOP_K, keep="residuals", **options)
        data["products"]["as chosen" if name is None else name] = compare(result, reference)
    common.Output("accuracy", asked.out, keep=not asked.quick).write(data, table_of(data), None)
    if not all(found["passed"] for found in data["products"].values()):
        sys.exit(1)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
