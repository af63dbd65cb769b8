"""The package murano-interp as the index has it: its pipeline with LoadPrompts and LogitLens.

It takes text and tokenises it; the ids are handed to it by a tokenizer that gives them back, so that everybody reads
the same tokens.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from protocol import BATCH, available, batches, serve


class GivenIds:
    """A tokenizer for which prompt number i of a batch is what was put in."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.ids = torch.zeros(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __call__(self, prompts: Any, **options: Any) -> Any:
        from transformers import BatchEncoding

        return BatchEncoding({"input_ids": self.ids, "attention_mask": torch.ones_like(self.ids)})


def as_transformers_4(folder: str, copy: Path) -> None:
    """The same model under the names that transformers 4, which this package pins, reads."""
    for file in Path(folder).iterdir():
        if file.name not in ("config.json", "tokenizer_config.json"):
            (copy / file.name).symlink_to(file)
    config = json.loads((Path(folder) / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:  # not known under its new name, it would silently be the default
        config["rope_theta"] = rope["rope_theta"]
    (copy / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((Path(folder) / "tokenizer_config.json").read_text())
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    (copy / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def load(folder: str) -> Any:
    from murano import MuranoModel

    with tempfile.TemporaryDirectory() as copy:
        as_transformers_4(folder, Path(copy))
        return MuranoModel(copy, device_map="cpu", dtype=torch.float32)


def make(model: Any, ids: list[list[int]], positions: str) -> Callable[[], Any]:
    from murano import LogitLens, Pipeline
    from murano.steps import LoadPrompts

    rows = min(len(ids), BATCH) * len(ids[0])
    # Measured: three times the tensor of all probabilities. An out-of-memory killer ends other people's processes too.
    needed = 3.3 * model.n_layers * rows * model.tokenizer.vocab_size * 4
    if needed > available():
        raise SystemExit(f"about {needed / 1e9:.0f} GB are needed and {available() / 1e9:.0f} GB are free")
    step = LogitLens(model)

    class Door:
        """The model with that tokenizer."""

        tokenizer = GivenIds(model.tokenizer)

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    step.model = Door()

    def run() -> list[Any]:
        found = []
        for batch in batches(ids):
            Door.tokenizer.ids = torch.tensor(batch)
            results = Pipeline([LoadPrompts(["x"] * len(batch)), step]).run()
            lens = results["logit_lens"]
            # Only this much is kept from batch to batch: all of it would not fit.
            found.append((lens.max_probs, lens.predicted_words))
        return found

    return run


serve(load, make, "murano-interp", "nnterp", "nnsight")
