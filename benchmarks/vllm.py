"""The lens inside a vLLM worker beside the engine alone: time, and bytes that come home.

Run in the environment of ``make test-vllm``:  .venv-vllm/bin/python -m benchmarks.vllm --help
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import token_prompts
from murano import MuranoModel
from murano.address import Address
from murano.engine_reader import read_generation
from murano.lens import MAX_CHUNK_BYTES, MAX_HELD_BYTES, logit_lens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a folder or hub id; the bundled model without it")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of each prompt")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--engine", type=json.loads, default={}, help='engine arguments as JSON: {"tensor_parallel_size": 8}'
    )
    given = parser.parse_args()
    model: Any = MuranoModel(given.model, backend="vllm", **given.engine)
    prompts = token_prompts(model.tokenizer, given.prompts, given.tokens)
    print(model.check_readout())
    positions, steps = given.prompts * given.tokens, given.prompts * given.new_tokens
    every = [Address(i) for i in range(model.n_layers)]

    def plain(new: int) -> Any:
        return model.run(dict(enumerate(prompts)), max_tokens=new)

    def follow() -> Any:
        options = {"max_chunk_bytes": MAX_CHUNK_BYTES, "max_held_bytes": MAX_HELD_BYTES}
        return read_generation(model, prompts, every, max_new_tokens=given.new_tokens, **options)

    print(f"\n{given.prompts} prompts × {given.tokens} tokens, {model.n_layers} layers")
    report("the engine alone", timed(lambda: plain(1), given.rounds), positions, "positions")
    for name, options in (("all layers, all positions", {}), ("all layers, last position", {"positions": "last"})):
        took = timed(lambda options=options: logit_lens(model, prompts, **options), given.rounds)
        cells = positions if not options else given.prompts
        # Of the last batch, which holds all prompts unless they are many.
        report(name, took, positions, f"positions, {model.bytes_received / cells:.0f} bytes home for each that is read")
    print(f"\n{given.prompts} prompts × {given.new_tokens} new tokens")
    report("the engine alone", timed(lambda: plain(given.new_tokens), given.rounds), steps, "tokens")
    report("every layer at every new token", timed(follow, given.rounds), steps, "tokens")
    model.close()


def report(name: str, took: tuple[float, float], count: int, what: str) -> None:
    print(f"{name:<32} {took[0]:8.2f} s {took[1]:8.2f} CPU s {count / took[0]:8.0f}/s {what}", flush=True)


def timed(work: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """The medians of wall time and of this process's CPU time of some rounds, after one that warms up."""
    work()
    wall, cpu = [], []
    for _ in range(rounds):
        start, started = time.perf_counter(), time.process_time()
        work()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - started)
    return statistics.median(wall), statistics.median(cpu)


if __name__ == "__main__":
    main()
