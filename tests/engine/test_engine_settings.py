"""Engines of tiny models: families, chunks of prompts, two workers, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from support.tiny_tokenizer import tiny_tokenizer
from transformers import AutoModelForCausalLM

from murano import MuranoModel
from murano.errors import InputError, MissingExtraError, ModelError, UnsupportedModelError
from murano.generation import follow_generation
from murano.lens import logit_lens

SMALL = 16 << 20
#: How the outputs of these families' layers hold the stream, as the proof found it.
HOLDS = {
    "llama": "hidden + residual",
    "gemma2": "hidden + residual",
    "qwen2": "hidden + residual",
    "qwen3": "hidden + residual",
    "mistral": "hidden + residual",
    "mixtral": "hidden + residual",
    "gemma3_text": "hidden + residual",
    "cohere": "the first of two",
    "stablelm": "the first of two",
    "gpt2": "one tensor",
    "opt": "one tensor",
    "granite": "one tensor",
    "bloom": "one tensor",
    # vLLM runs transformers' own code of these.
    "phi": "one tensor",
    "olmo2": "one tensor",
    "gpt_neox": "one tensor",
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 250, (n,), generator=generator).tolist() for n in (9, 4, 13, 1)]


def eager(folder: Path) -> MuranoModel:
    """With the attention that caps its scores, where a family does: transformers' default leaves the cap out."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return MuranoModel(model.eval(), tokenizer=tiny_tokenizer())


def assert_equal(found: Any, expected: Any, close: float = 1e-5) -> None:
    there = expected.attention_mask
    assert torch.equal(found.top_ids[:, there], expected.top_ids[:, there])
    torch.testing.assert_close(found.top_probs[:, there], expected.top_probs[:, there], rtol=0, atol=close)
    torch.testing.assert_close(found.entropy[:, there], expected.entropy[:, there], rtol=0, atol=10 * close)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def folder(family: str, **options: Any) -> Path:
        name = f"{family}-{len(options)}"
        if name not in made:
            made[name] = models.save(family, tmp_path_factory.mktemp("models") / name, **options)
        return made[name]

    return folder


@pytest.mark.parametrize("family", HOLDS)
def test_families_are_as_on_the_eager_backend(
    family: str, engines: Callable[..., Any], folders: Callable[..., Path]
) -> None:
    folder = folders(family)
    options: dict[str, Any] = {"max_new_tokens": 4, "add": {"L1.resid_post": torch.linspace(-2, 2, 64)}}
    # First: vLLM changes transformers' own class of a family that it has no code for, in the process that runs it.
    own = eager(folder)
    expected, written = logit_lens(own, prompts(), layers=["embeddings", "all"]), own.generate(prompts(), **options).ids
    model = engines(folder, kv_cache_memory_bytes=SMALL)
    proof = model.check_readout()
    assert proof.exact
    assert f"({HOLDS[family]})" in proof.steps
    # The attention of bloom, which adds its positions to the scores, rounds otherwise.
    close = 1e-4 if family == "bloom" else 1e-5
    assert_equal(logit_lens(model, prompts(), layers=["embeddings", "all"]), expected, close)
    assert model.generate(prompts(), **options).ids == written


def test_prompts_in_small_chunks(engines: Callable[..., Any], folders: Callable[..., Path]) -> None:
    folder = folders("llama")
    model = engines(folder, kv_cache_memory_bytes=SMALL, max_num_batched_tokens=16, max_num_seqs=4)
    long = [[4 + (7 * i + 3 * j) % 240 for i in range(n)] for j, n in enumerate((300, 45, 16, 17))]
    for _ in range(2):
        assert_equal(logit_lens(model, long), logit_lens(eager(folder), long))


def test_layers_that_return_nothing_readable_are_refused(
    engines: Callable[..., Any], folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from murano.model import vllm_worker

    folder = folders("llama")
    with monkeypatch.context() as patch:
        # A list alone would say: the first of two. The proof finds that it is not.
        own = vllm_worker.holdings
        patch.setattr(vllm_worker, "holdings", lambda output: {k: v for k, v in own(output).items() if k == "first"})
        with pytest.raises(
            UnsupportedModelError, match=r"LlamaForCausalLM can't be read inside vLLM: no reading .* off by"
        ):
            engines(folder, kv_cache_memory_bytes=SMALL, seed=1).check_readout()
        patch.setattr(vllm_worker, "holdings", lambda output: {way: own(output)["sum"] for way in ("first", "sum")})
        with pytest.raises(UnsupportedModelError, match="more than one reading"):
            engines(folder, kv_cache_memory_bytes=SMALL, seed=2).check_readout()


TWO_WORKERS = """
import sys, torch
from murano import MuranoModel
from murano.lens import logit_lens
def main():
    model = MuranoModel(sys.argv[1], backend="vllm", kv_cache_memory_bytes=16 << 20, **eval(sys.argv[3]))
    proof = model.check_readout()
    prompts = torch.load(sys.argv[2] + "/prompts.pt")
    lens = logit_lens(model, prompts, stats=["kl"])
    vector = torch.linspace(-2, 2, 64)
    ids = model.generate(prompts, max_new_tokens=4, add={1: vector}).ids
    found = {"exact": proof.exact, "ids": lens.top_ids, "probs": lens.top_probs, "kl": lens.stats["kl"], "written": ids}
    torch.save(found, sys.argv[2] + "/found.pt")
    model.close()
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ({"tensor_parallel_size": 2}, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}),
        ({}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
    ],
    ids=["two workers", "engine in another process"],
)
def test_other_ways_to_run_an_engine(
    options: dict[str, Any], environment: dict[str, str], folders: Callable[..., Path], tmp_path: Path
) -> None:
    folder = folders("llama")
    script = tmp_path / "run.py"
    script.write_text(TWO_WORKERS, encoding="utf-8")
    torch.save(prompts(), tmp_path / "prompts.pt")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(tmp_path), repr(options)],
        env={**os.environ, "PYTHONPATH": root, **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "insecure" not in done.stderr.lower()
    found = torch.load(tmp_path / "found.pt")
    own = eager(folder)
    expected = logit_lens(own, prompts(), stats=["kl"])
    there = expected.attention_mask
    assert found["exact"]
    assert torch.equal(found["ids"][:, there], expected.top_ids[:, there])
    torch.testing.assert_close(found["probs"][:, there], expected.top_probs[:, there], rtol=0, atol=1e-5)
    torch.testing.assert_close(found["kl"][:, there], expected.stats["kl"][:, there], rtol=0, atol=1e-4)
    assert found["written"] == own.generate(prompts(), max_new_tokens=4, add={1: torch.linspace(-2, 2, 64)}).ids


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enforce_eager": False}, "enforce_eager=False can't be used .* compiled graphs"),
        ({"enable_prefix_caching": True}, "cached prefix"),
        ({"async_scheduling": True}, "async_scheduling=True"),
        ({"speculative_config": {"method": "ngram"}}, "drafted tokens"),
        ({"pipeline_parallel_size": 2}, "no worker has all layers. Use tensor_parallel_size"),
        ({"data_parallel_size": 2}, "data_parallel_size=2"),
        ({"quantization": "fp8"}, "quantization='fp8' .* never held against the eager backend"),
        ({"worker_extension_cls": "mine.Worker"}, "worker_extension_cls"),
        ({"runner": "pooling"}, "predicts no tokens"),
        ({"device_map": "auto"}, "tensor_parallel_size says"),
    ],
    ids=str,
)
def test_what_would_hide_rows_is_refused_before_anything_loads(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        MuranoModel(backend="vllm", **options)


def test_sources_that_an_engine_can_not_load(
    folders: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders("llama")
    with pytest.raises(InputError, match=r"already loaded.*eager backend"):
        MuranoModel(eager(folder).hf_model, backend="vllm", tokenizer=tiny_tokenizer())
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises((InputError, ModelError)):
        MuranoModel(gguf, backend="vllm")
    quantised = models.save("llama", tmp_path / "quantised")
    config = quantised / "config.json"
    config.write_text(
        config.read_text()[:-2] + ', "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}'
    )
    with pytest.raises(InputError, match=r"is quantised \(gptq\)"):
        MuranoModel(quantised, backend="vllm")
    model = MuranoModel(folder, backend="vllm", tensor_paralel_size=2)
    with pytest.raises(InputError, match="Did you mean 'tensor_parallel_size'"):
        _ = model.engine
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        with pytest.raises(InputError, match=r"second model runner .* never tested"):
            _ = MuranoModel(folder, backend="vllm").engine
    with pytest.raises(ModelError, match="vLLM can't load"):
        _ = MuranoModel(folder, backend="vllm", kv_cache_memory_bytes=1).engine


def test_the_extra_is_named_where_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"murano-interp\[vllm\]"):
        MuranoModel("anything", backend="vllm")


def test_steering_nests(engines: Callable[..., Any], folders: Callable[..., Path]) -> None:
    folder = folders("llama")
    own, model = eager(folder), engines(folder, kv_cache_memory_bytes=SMALL)
    a, b = torch.linspace(-2, 2, 64), torch.linspace(3, -1, 64)

    def seen(of: Any) -> list[Any]:
        with of.steered({"L0.resid_post": a}):
            with of.steered({"L0.resid_post": b, "L1.resid_post": b}):
                both = logit_lens(of, prompts())
            written = of.generate(prompts(), max_new_tokens=4, add={"L1.resid_post": b}).ids
            return [both, logit_lens(of, prompts()), written]

    (both, one, written), (both_here, one_here, written_here) = seen(own), seen(model)
    assert_equal(both_here, both)
    assert_equal(one_here, one)
    assert written_here == written
    assert_equal(logit_lens(model, prompts()), logit_lens(own, prompts()))


def test_one_token_and_draws_that_are_too_hot(engines: Callable[..., Any], folders: Callable[..., Path]) -> None:
    folder = folders("llama")
    own, model = eager(folder), engines(folder, kv_cache_memory_bytes=SMALL)
    found, expected = (follow_generation(m, prompts(), max_new_tokens=1) for m in (model, own))
    assert torch.equal(found.sampled_ids, expected.sampled_ids)
    torch.testing.assert_close(found.own_log_probs, expected.own_log_probs, rtol=0, atol=1e-4)
    with pytest.raises(InputError, match=r"temperature=2.1: vLLM takes 0 to 2"):
        follow_generation(model, prompts(), max_new_tokens=2, temperature=2.1, seed=1)
    assert model.decode(torch.zeros(2, 0, 64)).shape == (2, 0, model.vocab_size)
    assert [tuple(t.shape) for t in model.decode_top_k(torch.zeros(0, 64), 3)] == [(0, 3), (0, 3)]


def test_the_context_that_was_asked_for(engines: Callable[..., Any], folders: Callable[..., Path]) -> None:
    folder = folders("llama")
    model = engines(folder, kv_cache_memory_bytes=SMALL, max_model_len=20)
    full = [[4 + i for i in range(20)]]
    assert_equal(logit_lens(model, full), logit_lens(eager(folder), full))
    with pytest.raises(InputError, match="has 21 tokens, but the model's context is 20"):
        logit_lens(model, [[4] * 21])


def test_closing_one_of_two_engines(folders: Callable[..., Path], engines: Callable[..., Any]) -> None:
    options = {"backend": "vllm", "kv_cache_memory_bytes": SMALL}
    engines(folders("llama"), kv_cache_memory_bytes=SMALL, max_model_len=64).close()  # none but those below
    expected = logit_lens(eager(folders("llama")), prompts())
    with MuranoModel(folders("llama"), **options) as one:
        with MuranoModel(folders("qwen2"), **options) as other:
            logit_lens(other, prompts())
            assert_equal(logit_lens(one, prompts()), expected)
        assert "engine" not in vars(other)
        assert_equal(logit_lens(one, prompts()), expected)


def test_what_the_engine_does_not_take_is_no_matter_of_the_model(folders: Callable[..., Path]) -> None:
    for wrong, said in (
        ({"no_such": 1}, "'no_such' is no argument of vLLM's engine"),
        ({"block_size": "x"}, "vLLM can't load .* with block_size='x'"),
    ):
        with pytest.raises((InputError, ModelError), match=said) as caught:
            logit_lens(MuranoModel(folders("llama"), backend="vllm", **wrong), prompts())
        assert not isinstance(caught.value, UnsupportedModelError)
    with pytest.raises(InputError, match="enable_lora=True .* Merge them into the weights"):
        MuranoModel(folders("llama"), backend="vllm", enable_lora=True)
