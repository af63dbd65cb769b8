"""Makes ``tests/data/run_v1``: a small saved run of the first version, kept for ever, which every later one must open.

Run it again only before the first release; afterwards a new version gets a new folder beside the old one.
"""

from __future__ import annotations

import base64
import shutil
import tempfile
from pathlib import Path

import torch

from murano import keys
from murano.address import Address
from murano.artifacts.logit_lens import LogitLensResult
from murano.artifacts.run import save_run
from murano.artifacts.words import TokenWords
from murano.prompts import as_prompts
from murano.results import Results, StepRecord

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
WORDS = {0: "The", 1: " capital", 2: " of", 3: " France", 4: "日", 5: "本", 6: " Paris", 7: " the"}


def results() -> Results:
    """Two prompts of four and two tokens, three layers, the two most probable tokens of each."""
    input_ids = torch.tensor([[0, 1, 2, 3], [-1, -1, 4, 5]])
    mask = input_ids >= 0
    cells = mask.expand(3, 2, 4)
    top_ids = torch.tensor([7, 6]).repeat(3, 2, 4, 1)
    top_ids[2] = torch.tensor([6, 7])
    top_ids[~cells] = -1
    top_probs = torch.tensor([0.5, 0.25]).repeat(3, 2, 4, 1)
    top_probs[2] = torch.tensor([0.75, 0.125])
    top_probs[~cells] = float("nan")
    other = torch.linspace(0, 2, 24).reshape(3, 2, 4).masked_fill(~cells, float("nan"))
    run = Results()
    run[keys.PROMPTS] = as_prompts(["The capital of France is", "日本"])
    run[keys.LOGIT_LENS] = LogitLensResult(
        addresses=(Address(None, "embeddings"), Address(0), Address(1)),
        top_ids=top_ids,
        top_probs=top_probs,
        entropy=other,
        log_normalizer=other + 1,
        input_ids=input_ids,
        attention_mask=mask,
        position_index=torch.tensor([[0, 1, 2, 3], [-1, -1, 0, 1]]),
        words=TokenWords(WORDS),
        model={
            "model_id": "tiny",
            "revision": None,
            "dtype": "float32",
            "device": "cpu",
            "n_layers": 2,
            "vocab_size": 8,
        },
        readout={"exact": True, "max_difference": 0.0},
        stats={"rank": other.to(torch.bfloat16)},
        notes=("made by tests/data/make_run_v1.py",),
    )
    run["score"] = 0.75
    run["pair"] = (1, float("inf"))
    run["table"] = torch.empty(0, 3)
    run.history = [
        StepRecord("LoadPrompts", "LoadPrompts(['The capital of France is', '日本'])", 0.001, ("prompts",)),
        StepRecord("LogitLens", "LogitLens(model, layers='all', top_k=2)", 0.25, ("logit_lens",)),
    ]
    return run


if __name__ == "__main__":
    here = Path(__file__).parent
    shutil.rmtree(here / "run_v1", ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        plot = Path(folder, "dot.png")
        plot.write_bytes(base64.b64decode(PNG))
        run = results()
        run[keys.PLOTS] = [str(plot)]
        print(save_run(run, here, "run_v1"))
