"""Kill a checkpointed lens at random moments and go on: every resumed result must be equal to the bit.

    python tests/campaigns/resume_campaign.py --kills 200

One process makes the model and forks a child for each try, so that a try costs no import.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from support.tiny_models import tiny_model  # noqa: E402
from support.tiny_tokenizer import tiny_tokenizer  # noqa: E402

from murano import MuranoModel, Pipeline, keys  # noqa: E402
from murano.artifacts.codec import fingerprint  # noqa: E402
from murano.artifacts.run import load_run, verify_run  # noqa: E402
from murano.prompts import Prompt  # noqa: E402
from murano.steps import LoadPrompts, LogitLens, Save  # noqa: E402


def pipeline(model: MuranoModel, folder: Path) -> Pipeline:
    """A lens of 120 prompts of different lengths, in some thirty batches, and its saving."""
    choose = random.Random(0)
    prompts = [Prompt(token_ids=tuple(choose.choices(range(16, 250), k=choose.randint(3, 40)))) for _ in range(120)]
    lens = LogitLens(model, max_batch_tokens=96, max_chunk_bytes=37 * 4 * 256)
    return Pipeline([LoadPrompts(prompts), lens, Save(folder, run_name="run")])


def child(model: MuranoModel, folder: Path) -> None:
    """Run the pipeline in a forked process and end it without any clean-up."""
    logging.disable(logging.CRITICAL)
    pipeline(model, folder).run(resume=folder / "run")
    os._exit(0)


def main() -> int:
    """Run the campaign; the exit status says whether every resume was right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked child can't use the parent's threads
    chance = random.Random(options.seed)
    model = MuranoModel(tiny_model("llama"), tokenizer=tiny_tokenizer())
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name) / "whole"
        logging.disable(logging.CRITICAL)
        started = time.perf_counter()
        expected = fingerprint(pipeline(model, whole).run(resume=whole / "run")[keys.LOGIT_LENS])
        length = time.perf_counter() - started
        kills = runs = wrong = resumed = 0
        while kills < options.kills:
            runs += 1
            folder = Path(name) / f"try{runs}"
            while True:
                pid = os.fork()
                if pid == 0:
                    child(model, folder)
                time.sleep(chance.uniform(0.05, 0.7) * length)
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                if os.WIFSIGNALED(status):
                    kills += 1
                    resumed += any((folder / ".run.checkpoints").glob("*.pt"))
                    if kills < options.kills or not (folder / "run").exists():
                        continue
                elif os.WEXITSTATUS(status) != 0:
                    wrong += 1
                    break
                if (folder / "run" / "manifest.json").exists():
                    ok = verify_run(folder / "run").ok
                    same = fingerprint(load_run(folder / "run")[keys.LOGIT_LENS]) == expected
                    wrong += not (ok and same)
                break
        print(
            f"{kills} kills in {runs} runs of {length:.2f} s, {resumed} of them with a checkpoint; wrong results: {wrong}"
        )
    return 1 if wrong or not resumed else 0


if __name__ == "__main__":
    sys.exit(main())
