"""Logit attribution measured: ``python -m benchmarks.attribution`` writes the tables of ``docs/attribution.md``.

Three of them: which families can be split and how exactly the shares add up; how they compare with TransformerLens's, on models that
both load; what it costs, compared with a plain forward of the same batches. ``--only`` makes one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.reading import ids_of  # noqa: E402
from support.tiny_models import causal_lm_types, tiny_model  # noqa: E402
from support.tiny_tokenizer import tiny_tokenizer  # noqa: E402

from benchmarks.common import machine, machine_line, markdown_table, put_between_markers, timed, token_prompts  # noqa: E402
from benchmarks.peers_client import SCRIPTS, peers_folder  # noqa: E402
from murano import MuranoModel, Prompt, logit_attribution, shipped_prompts  # noqa: E402
from murano.errors import InputError, UnsupportedModelError  # noqa: E402
from murano.model import batching  # noqa: E402
from murano.model.anatomy import run  # noqa: E402

DOCS = ROOT / "docs" / "attribution.md"


def main() -> None:
    """Make the tables."""
    makers: dict[str, Callable[[], str]] = {"families": families, "transformer-lens": transformer_lens, "cost": cost}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(makers), action="append", help="make this table; all without it")
    parser.add_argument("--dry", action="store_true", help="print, and leave the page as it is")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for name in options.only or makers:
        table = makers[name]()
        print(table, flush=True)
        if not options.dry:
            put_between_markers(DOCS, name, table)


# Families


def families() -> str:
    """A row for each family that transformers maps to a causal language model."""
    torch.set_num_threads(1)
    rows = [family_row(family) for family in causal_lm_types()]
    kinds = [row[2] for row in rows]
    counts = {kind: sum(k.startswith(kind) for k in kinds) for kind in ("by component", "by layer", "refused")}
    heads = sum("heads" in k for k in kinds)
    worst = max(float(cell) for row in rows for cell in row[3:6] if cell[:1].isdigit())
    head = (
        f"Of {len(rows)} families, {counts['by component']} are split by component ({heads} of them by head), "
        f"{counts['by layer']} by layer only, and {counts['refused']} are refused. The most that a sum leaves over is "
        f"{worst:.1e} of a logit "
        "(float32, tiny random models, three prompts of different lengths, all positions)."
    )
    names = ("family", "class", "split", "layers", "components", "heads", "why not finer")
    # Not markdown_table: it would pad every row to the longest of the reasons.
    lines = [f"| {' | '.join(row)} |" for row in (names, ("---",) * len(names), *rows)]
    return "\n".join([head, "", *lines])


def family_row(family: str) -> tuple[str, ...]:
    """How finely one family is split, and what is left over."""
    module = tiny_model(family)
    model = MuranoModel(module, tokenizer=tiny_tokenizer())
    left: list[str] = []
    why = ""
    try:
        ids = ids_of(model, batch=3, length=9).tolist()
        prompts = [
            Prompt(token_ids=tuple(i[:n]), targets=(30,), foils=(60,)) for i, n in zip(ids, (9, 6, 9), strict=True)
        ]
        for by in ("layer", "component", "head"):
            found = logit_attribution(model, prompts, by=by, positions="all")
            left.append(f"{float(found.leftover[found.attention_mask].abs().max()):.1e}")
    except (InputError, UnsupportedModelError) as error:
        why = " ".join(str(error).split()).partition(". Use by=")[0].replace("|", "\\|")
    kind = ("refused", "by layer", "by component", "by component, heads")[len(left)]
    return (family, type(module).__name__, kind, *left, *["—"] * (3 - len(left)), why)


# TransformerLens


def transformer_lens() -> str:
    """The largest difference of a share on small models of two kinds."""
    python = peers_folder() / "transformer-lens" / "bin" / "python"
    rows = []
    for family in ("gpt2", "llama"):
        with tempfile.TemporaryDirectory() as folder:
            tiny_model(family).save_pretrained(folder)
            tiny_tokenizer().save_pretrained(folder)
            model = MuranoModel(folder)
            for seed in range(3):
                ids = ids_of(model, batch=2, length=8, seed=seed)[0].tolist()
                asked = {"folder": folder, "ids": ids, "target": 30 + seed, "foil": 60 + seed}
                theirs = ask(python, asked)
                gaps = compared(model, asked, theirs["shares"])
                rows.append((family, str(seed), *(f"{gap:.1e}" for gap in gaps), f"{theirs['difference']:+.3f}"))
    return markdown_table(("model", "prompt", "components differ by", "heads differ by", "difference of logits"), rows)


def ask(python: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What the other library answers, in its own environment."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    script = SCRIPTS / "attribute_transformer_lens.py"
    done = subprocess.run(
        [str(python), str(script)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def compared(model: MuranoModel, asked: dict[str, Any], theirs: dict[str, float]) -> tuple[float, float]:
    """The largest difference of components, and of heads."""
    prompt = Prompt(token_ids=tuple(asked["ids"]), targets=(asked["target"],), foils=(asked["foil"],))
    gaps = []
    for by in ("component", "head"):
        found = logit_attribution(model, [prompt], by=by)
        worst = 0.0
        for address, mine in zip(found.components, found.values()[0].tolist(), strict=True):
            if by == "head" and address.part.startswith("h"):
                other = theirs[f"L{address.layer}H{address.part[1:]}"]
            elif by == "component" and address.component == "embeddings":
                other = theirs["embed"] + theirs.get("pos_embed", 0.0)
            elif by == "component" and address.layer is not None:
                other = theirs[f"{address.layer}_{address.component}"]
            else:
                continue
            worst = max(worst, abs(mine - other))
        gaps.append(worst)
    return gaps[0], gaps[1]


# Cost


def cost() -> str:
    """The time of an attribution of the last position, by that of a plain forward of the same batches."""
    model = MuranoModel(dtype=torch.float32)
    facts = list(shipped_prompts("facts"))[:48]
    long = [Prompt(token_ids=tuple(i), targets=(260,), foils=(253,)) for i in token_prompts(model.tokenizer, 4, 128)]
    rows = []
    for name, prompts in (("48 facts", facts), ("4 × 128 tokens", long)):
        encoded = [batching.encode(p, model.tokenizer) for p in prompts]
        batches = batching.make_batches(encoded, max_tokens=2048, mix_lengths=True)

        def forward(batches: Any = batches) -> None:
            with torch.no_grad():
                for batch in batches:
                    run(model.hf_model, batch.ids)

        row = [name, f"{sum(b.ids.numel() for b in batches)}"]
        seconds: dict[str, list[float]] = {"forward": []}
        runs: dict[str, Callable[[], Any]] = {"forward": forward}
        for by in ("layer", "component", "head", "neuron_topk"):
            runs[by] = lambda by=by, prompts=prompts: logit_attribution(model, prompts, by=by)
            seconds[by] = []
        for number in range(8):  # in turn, so that a slow moment of the machine meets all
            for by, one in runs.items():
                took = timed(one)
                if number:  # the first round warms up
                    seconds[by].append(took)
        row.append(f"{statistics.median(seconds['forward']):.2f} s")
        ratios = (
            statistics.median(a / b for a, b in zip(seconds[by], seconds["forward"], strict=True))
            for by in runs
            if by != "forward"
        )
        rows.append((*row, *(f"{ratio:.2f}×" for ratio in ratios)))
    names = ("prompts", "tokens, padding counted", "plain forward", "layers", "components", "heads", "neurons")
    return f"{markdown_table(names, rows)}\n\n{machine_line(machine())}"


if __name__ == "__main__":
    main()
