"""What it costs to read every layer while the model writes, and that nothing is changed: ``python -m benchmarks.generation``.

Beside the run are the two parts that nobody can do without: transformers' ``generate`` of the same prompts, and a bare ``torch.mm`` of as
many rows as are read. The accuracy is held against the plain lens of each prompt extended by what was written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import common
from benchmarks.contenders import chunk_rows, model_in_float32
from murano import MuranoModel, follow_generation, logit_lens, shipped_prompts

#: Tokens of a prompt, and by how many it is continued.
PROMPT, NEW = 12, 32


def generate(model: MuranoModel, ids: list[list[int]]) -> list[list[int]]:
    """What transformers writes, prompts of one length in one batch."""
    batch = torch.tensor(ids)
    out = model.hf_model.generate(  # type: ignore[operator]
        batch,
        attention_mask=torch.ones_like(batch),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
    )
    return [row[batch.shape[1] :].tolist() for row in out]


def bare(model: MuranoModel, rows: int) -> Callable[[], None]:
    """The product of as many rows, in chunks as Murano makes them, into one buffer."""
    hf: Any = model.hf_model
    weight, norm = hf.lm_head.weight, hf.model.norm
    room = chunk_rows(weight.shape[0])
    hidden, buffer = torch.randn(room, weight.shape[1]), torch.empty(room, weight.shape[0])

    @torch.no_grad()
    def run() -> None:
        for start in range(0, rows, room):
            n = min(room, rows - start)
            torch.mm(norm(hidden[:n]), weight.T, out=buffer[:n])

    return run


def endless(model: MuranoModel) -> None:
    """No token ends a text, so that every prompt has as many steps."""
    for config in (model.hf_model.generation_config, model.hf_model.config, model.config):
        config.eos_token_id = None  # type: ignore[union-attr]


def speed(model: MuranoModel, prompts: int, rounds: int) -> dict[str, Any]:
    """Seconds of each, in rounds in which all take turns."""
    ids = common.token_prompts(model.tokenizer, prompts, PROMPT)
    rows = prompts * NEW * model.n_layers
    runs = {
        "murano": lambda: follow_generation(model, ids, max_new_tokens=NEW),
        "generate": lambda: generate(model, ids),
        "bare": bare(model, rows),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, run in runs.items():
            before = time.process_time()
            took = common.timed(run)
            if round_:  # the first one warms up
                seconds[name].append(took)
                cpu[name].append(time.process_time() - before)
        print(f"  {prompts} × {NEW}: round {round_} of {rounds}", file=sys.stderr, flush=True)
    return {
        "prompts": prompts,
        "rows": rows,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "ratio": _ratios(seconds),
        "cpu_ratio": _ratios(cpu),
    }


def _ratios(seconds: dict[str, list[float]]) -> list[float]:
    """Murano's time over the sum of the two others, round by round."""
    return [whole / (written + product) for whole, written, product in zip(*seconds.values(), strict=True)]


def accuracy(model: MuranoModel) -> dict[str, Any]:
    """20 prompts of many lengths: their tokens beside ``generate``'s, their cells beside the plain lens's."""
    prompts = shipped_prompts("facts")[::11]
    encoded = [model.encode(prompt) for prompt in prompts]
    lens = follow_generation(model, prompts, max_new_tokens=NEW)
    same, worst, beyond, cells, top = 0, 0.0, 0, 0, 0
    for prompt, ids in enumerate(encoded):
        written = lens.sampled_ids[prompt].tolist()
        same += written == generate(model, [ids])[0]
        plain = logit_lens(model, [[*ids, *written[:-1]]], positions=range(-NEW, 0))
        gap = (lens.top_probs[:, prompt] - plain.top_probs[:, 0]).abs()
        worst, beyond = max(worst, float(gap.max())), beyond + int((gap > 1e-5).sum())
        cells += gap[..., 0].numel()
        top += int((lens.top_ids[:, prompt] == plain.top_ids[:, 0]).all(-1).sum())
    return {
        "prompts": len(prompts),
        "same_tokens": same,
        "cells": cells,
        "same_ids": top,
        "worst": worst,
        "probabilities": cells * lens.top_ids.shape[-1],
        "beyond": beyond,
    }


def table(data: dict[str, Any]) -> str:
    """Both as text."""
    rows = []
    for case in data["speed"]:
        middle = {name: common.median(seconds) for name, seconds in case["seconds"].items()}
        spread = f"{min(case['ratio']):.2f} – {max(case['ratio']):.2f}"
        rows.append(
            [
                f"{case['prompts']} × {NEW}",
                *(f"{middle[name]:.2f}" for name in ("murano", "generate", "bare")),
                f"{common.median(case['ratio']):.2f}",
                spread,
                f"{common.median(case['cpu_ratio']):.2f}",
            ]
        )
    header = ["prompts × steps", "Murano, s", "generate, s", "bare product, s", "ratio", "min – max", "of CPU time"]
    found = data["accuracy"]
    said = (
        f"{found['same_tokens']} of {found['prompts']} prompts have the very tokens of `generate`. Of {found['cells']} cells "
        f"(layer, step), {found['same_ids']} have the same five ids as the plain lens of what was written so far; of "
        f"{found['probabilities']} probabilities, {found['beyond']} differ by more than 1e-5, the largest by {found['worst']:.2g}."
    )
    return f"{common.markdown_table(header, rows)}\n\n{said}\n\n{common.machine_line(data['machine'])}"


def main() -> None:
    """Measure and write."""
    parser = common.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are counted")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 8, 20], help="so many prompts at once")
    args = parser.parse_args()
    model = model_in_float32()
    endless(model)
    model.check_readout()
    cases = (1, 4) if args.quick else args.prompts
    rounds = 1 if args.quick else args.rounds
    data = {
        "machine": common.machine(),
        "speed": [speed(model, prompts, rounds) for prompts in cases],
        "accuracy": accuracy(model),
    }
    common.Output("generation", args.out, keep=not args.quick).write(data, table(data), None)


if __name__ == "__main__":
    main()
