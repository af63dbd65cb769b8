"""Which causal language models are read exactly: ``python -m benchmarks.families`` writes ``docs/families.md``.

A tiny random model is built of every family that transformers maps to a causal language model, with its soft-caps, multipliers and
scales set to values that show. Two prompts A and B run; what leaves the last block for B is turned into logits while nothing of B is
known, and compared with transformers' own logits for B at the same shape.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import platform
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.reading import own_logits  # noqa: E402
from support.tiny_models import causal_lm_types, tiny_inputs, tiny_model  # noqa: E402
from support.tiny_tokenizer import tiny_tokenizer  # noqa: E402

from murano.errors import UnsupportedModelError  # noqa: E402
from murano.model.anatomy import find_anatomy  # noqa: E402
from murano.model.proof import ReadoutProof, difference, prove  # noqa: E402

#: Seconds that nnterp may take for one family.
LIMIT = 60


@dataclass
class Row:
    """What is written about one family."""

    family: str
    model_class: str = ""
    proof: ReadoutProof | None = None
    bf16: ReadoutProof | None = None
    refused: str = ""
    bf16_refused: str = ""
    nnterp: str = ""
    logits_differ: bool = False


def main() -> None:
    """Measure every family and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "families.md")
    parser.add_argument("--families", nargs="*", default=causal_lm_types(), help="only these")
    parser.add_argument("--without-nnterp", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    started = time.perf_counter()
    rows = [measure(family, not options.without_nnterp) for family in tqdm(options.families, unit="family")]
    options.out.write_text(page(rows, time.perf_counter() - started), encoding="utf-8")
    print(f"wrote {options.out}")


def measure(family: str, with_nnterp: bool = True) -> Row:
    """Build the family twice, once for each precision, and a third time for nnterp."""
    row = Row(family)
    module = tiny_model(family)
    row.model_class = type(module).__name__
    row.proof, row.refused = read(module)
    row.bf16, row.bf16_refused = read(tiny_model(family, dtype=torch.bfloat16))
    if row.proof is not None:
        row.logits_differ = bare_head_differs(module)
    row.nnterp = by_nnterp(family) if with_nnterp else "not run"
    return row


def read(module: Any) -> tuple[ReadoutProof | None, str]:
    """The proof, or why there is none."""
    try:
        return prove(find_anatomy(module))[1], ""
    except UnsupportedModelError as error:
        return None, str(error)


@torch.no_grad()
def bare_head_differs(module: Any) -> bool:
    """Whether what the unembedding returns is not what the model predicts from."""
    head = find_anatomy(module).head
    seen: list[Tensor] = []
    if head is None:
        return False
    handle = module.get_submodule(head).register_forward_hook(lambda _m, _a, output: seen.append(output))
    logits = own_logits(module, tiny_inputs(module))
    handle.remove()
    return seen[-1].shape != logits.shape or not torch.equal(seen[-1], logits)


@torch.no_grad()
def by_nnterp(family: str) -> str:
    """What ``lm_head(ln_final(x))`` with nnterp's own names and its own check at load is worth."""
    module = tiny_model(family)
    ids = tiny_inputs(module, 3, 7)
    try:
        logits = own_logits(module, ids)
    except Exception as error:
        return f"the model can't run ({type(error).__name__})"
    try:
        with quiet(), limited(LIMIT):
            from nnterp import StandardizedTransformer

            wrapped = StandardizedTransformer(module, tokenizer=tiny_tokenizer())
    except TimeoutError:
        return f"no answer in {LIMIT} s"
    except BaseException as error:  # it raises exceptions of its own, and of nnsight's threads
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"refused ({type(error).__name__})"
    try:
        layer, norm, head = (part._module for part in (wrapped.layers[-1], wrapped.ln_final, wrapped.lm_head))
    except Exception as error:
        return f"no names ({type(error).__name__})"
    seen: list[Tensor] = []
    handle = layer.register_forward_hook(
        lambda _m, _a, output: seen.append(output if isinstance(output, Tensor) else output[0])
    )
    own_logits(module, ids)
    handle.remove()
    try:
        gap = difference(head(norm(seen[-1])), logits)
    except Exception as error:
        return f"fails ({type(error).__name__})"
    if gap == float("inf"):
        return "wrong shape"
    return (
        "exact"
        if gap == 0
        else "exact up to rounding"
        if gap < 2e-5 * float(logits.abs().max())
        else f"**wrong by {gap:.2g}**"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what nnterp prints at load."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after so many seconds."""

    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def verdict(proof: ReadoutProof | None) -> str:
    """One cell."""
    if proof is None:
        return "refused"
    return "exact" if proof.exact else f"{proof.max_difference:.2g}"


def page(rows: list[Row], seconds: float) -> str:
    """The whole page."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "nnterp", "nnsight"))
    fp32 = sum(row.proof is not None and row.proof.exact for row in rows)
    bf16 = sum(row.bf16 is not None and row.bf16.exact for row in rows)
    counts = {
        "exact": sum(row.nnterp.startswith("exact") for row in rows),
        "wrong": sum(row.nnterp.startswith(("**wrong", "wrong")) for row in rows),
    }
    differ = [row.family for row in rows if row.logits_differ]
    alone = [row.family for row in rows if row.proof is not None and not row.proof.pads]
    alone_bf16 = [row.family for row in rows if row.bf16 is not None and not row.bf16.pads and row.family not in alone]
    lines = [
        "# Families",
        "",
        "Made by `python -m benchmarks.families`; do not edit. "
        f"{packages}, Python {platform.python_version()}, {os.cpu_count()} cores, {seconds:.0f} s.",
        "",
        "One tiny random model of each family that transformers maps to a causal language model, with soft-caps, multipliers and",
        "scales set to values that show. *Exact* means: while prompt A's tokens run, the residual that prompt B had after its last block",
        "is turned into logits, and every one of them equals transformers' own logits for B to the bit (3 prompts of 7 tokens).",
        "A number is the largest absolute difference of a logit. Refused families raise `UnsupportedModelError` at load.",
        "",
        "nnterp's column is its own projection, `lm_head(ln_final(x))`, under the names that it finds itself and with the check that it",
        f"makes itself at load, in float32 on the same weights; a load that takes over {LIMIT} s counts as no answer.",
        "",
        f"| | of {len(rows)} |",
        "|---|---|",
        f"| exact in float32 | {fp32} |",
        f"| exact in bfloat16 | {bf16} |",
        f"| refused in float32 | {sum(row.proof is None for row in rows)} |",
        f"| nnterp's projection right | {counts['exact']} |",
        f"| nnterp's projection wrong without a word | {counts['wrong']} |",
        f"| nnterp refuses or has no names | {len(rows) - counts['exact'] - counts['wrong']} |",
        "",
        f"`logits` and `lm_head` differ in: {', '.join(differ)}.",
        "",
        f"Prompts of different lengths do not share a batch in: {', '.join(alone) or 'none'}"
        + (
            f"; in bfloat16 (where experts are chosen by near ties) nor in: {', '.join(alone_bf16)}"
            if alone_bf16
            else ""
        )
        + ".",
        "",
        "| family | class | path | float32 | bfloat16 | what is done, or why it is refused | nnterp |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        steps = row.refused if row.proof is None else row.proof.steps if row.proof.path == "short" else row.proof.reason
        path = row.proof.path if row.proof is not None else "—"
        cells = (row.family, row.model_class, path, verdict(row.proof), verdict(row.bf16), one_line(steps), row.nnterp)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def one_line(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
