"""Rows that are read a tile of the vocabulary at a time, beside the same rows read whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reading import held
from support.tiny_tokenizer import tiny_tokenizer
from torch import Tensor

from murano import MuranoModel, Prompt, reader, tiles
from murano.artifacts.logit_lens import LogitLensResult
from murano.errors import InputError
from murano.lens import logit_lens, reread
from murano.model.product import TorchProduct
from murano.model.tail import ShortPath
from murano.readout import search
from murano.readout.reduce import LOG2_E, Reduction, reduce_rows
from murano.readout.search import Search
from murano.tiles import Tiles, plan

#: What follows the head differs: nothing, a bias, a scale, a soft-cap.
FAMILIES = [
    "llama",
    "gpt2",
    "gptj",
    "phi",
    "cohere",
    "gemma2",
    "granite",
    "qwen3",
    "gpt_neox",
    "mamba",
    "olmo2",
    "falcon",
]


@contextmanager
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tiles for a vocabulary of a few hundred; says how many rows were read by them."""
    read: list[int] = []
    for module in (tiles, reader):
        monkeypatch.setattr(module, "FEWEST_ROWS", 1)
    monkeypatch.setattr(tiles, "WIDTH", 64)
    monkeypatch.setattr(search, "GROUP", 4)
    monkeypatch.setattr(tiles, "MOST_TOKENS", 1)
    own = Tiles.read

    def watched(self: Tiles, rows: Tensor, *rest: Any) -> Any:
        found = own(self, rows, *rest)
        read.append(len(rows) if found is not None else 0)
        return found

    monkeypatch.setattr(Tiles, "read", watched)
    yield read


def assert_alike(a: LogitLensResult, b: LogitLensResult, tolerance: float = 2e-6) -> None:
    assert torch.equal(a.top_ids, b.top_ids)
    for name in ("top_probs", "entropy", "log_normalizer", "target_log_probs", "foil_log_probs"):
        one, other = getattr(a, name), getattr(b, name)
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(one.isnan(), other.isnan()), name
            # Where logits are large, what rounding does to them shows in the entropy of rows that are nearly certain.
            least = 2.0 if name == "entropy" and tolerance >= 1e-5 else 1.0
            scale = other.nan_to_num().abs().clamp(min=least)
            assert ((one - other).nan_to_num().abs() <= tolerance * scale).all(), name
    for name in ("target_ranks", "foil_ranks"):
        if getattr(a, name) is not None:
            off = (getattr(a, name) - getattr(b, name)).abs()
            # Of 13 000 logits some are nearer to each other than rounding.
            assert off.max() <= (0 if tolerance < 1e-5 else 1) and (off == 0).float().mean() > 0.99, name


def prompts_of(model: MuranoModel, n: int = 12, length: int = 9) -> list[Prompt]:
    ids = torch.randint(16, model.vocab_size, (n, length), generator=torch.Generator().manual_seed(1)).tolist()
    return [Prompt(token_ids=tuple(i), targets=(i[0], i[-1]), foils=(i[1],)) for i in ids]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lens_by_tiles_is_the_lens_of_whole_rows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids and ranks equal, numbers within rounding; targets, foils and what follows in the prompt included."""
    model = held(family)
    asked: dict[str, Any] = {"top_k": 3, "stats": ["margin", "surprisal", "next_rank"]}
    whole = logit_lens(model, prompts_of(model), product="torch", **asked)
    with small_tiles(monkeypatch) as read:
        by_tiles = logit_lens(model, prompts_of(model), product="tiles", **asked)
    assert sum(read) == model.n_layers * 12 * 9
    assert_alike(by_tiles, whole)
    for name in ("margin", "surprisal", "next_rank"):
        assert torch.allclose(by_tiles.stats[name], whole.stats[name], atol=2e-5, equal_nan=True), name


@pytest.mark.parametrize(("top_k", "turns"), [(3, 4), (5, 4), (6, 3), (10, 2), (11, 1), (16, 1)])
def test_rows_take_turns_with_a_tile_which_is_packed_once(
    top_k: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = held("llama")
    whole = logit_lens(model, prompts_of(model), product="torch", top_k=top_k)
    packed: list[int] = []
    own = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", lambda tile, rows: (packed.append(len(tile)), own(tile, rows))[1]
    )
    with small_tiles(monkeypatch) as read:
        monkeypatch.setattr(tiles, "MOST_ROWS", 64)
        monkeypatch.setattr(search, "FEWEST_GROUPS", 1)
        model._products.clear()
        by_tiles = logit_lens(model, prompts_of(model), product="onednn", top_k=top_k)
    rows = model.n_layers * 12 * 9
    assert read == [64 * turns] * (rows // (64 * turns)) + [rest for rest in [rows % (64 * turns)] if rest]
    assert packed[0] == 1  # can it be had?
    assert packed[1:] == [64] * 4 * (len(read) + 1)  # and once more for the row that is held against the model's own
    assert_alike(by_tiles, whole, 1e-5)


def test_rows_whose_tokens_were_not_foreseen_to_the_bit_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting larger logits beside a number that is off would give another rank."""
    model = held("llama")
    whole = logit_lens(model, prompts_of(model), product="torch", top_k=2)
    own, off = Tiles._foresee, []

    def nearly(self: Tiles, hidden: Tensor, *rest: Any) -> Tensor:
        found = own(self, hidden, *rest)
        found[::3] += 0.25  # the ranks of these rows would be wrong
        off.append(len(found[::3]))
        return found

    with small_tiles(monkeypatch):
        monkeypatch.setattr(Tiles, "_foresee", nearly)
        by_tiles = logit_lens(model, prompts_of(model), product="tiles", top_k=2)
    assert sum(off) > 100
    assert_alike(by_tiles, whole)


def test_so_many_tokens_that_foreseeing_them_costs_a_product_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = held("llama")
    with small_tiles(monkeypatch) as read:
        monkeypatch.setattr(tiles, "MOST_TOKENS", 0.01)
        found = logit_lens(model, prompts_of(model), product="tiles")
    assert sum(read) == 0
    assert_alike(found, logit_lens(model, prompts_of(model), product="torch"))


@pytest.mark.parametrize("asked", [{"stats": "kl"}, {"keep": "logits"}])
def test_what_needs_whole_rows_reads_whole_rows(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = held("llama")
    with small_tiles(monkeypatch) as read:
        logit_lens(model, prompts_of(model), **asked)
    assert read == []


def test_a_tail_that_treats_tokens_differently_has_no_tiles() -> None:
    """A soft-cap is the same for every token; a slice of the vocabulary, or a bias with a number for each, is not."""
    from murano.model.tail import _FLOW, Arithmetic

    tail = held("llama").tail
    assert isinstance(tail, ShortPath) and tail.tiles is tail.weight
    aten, vocab = torch.ops.aten, 256
    alike = Arithmetic(aten.mul.Tensor, (_FLOW, torch.tensor(2.0)), {})
    assert ShortPath([*tail.steps, alike], tail.head).tiles is tail.weight
    for step in (
        Arithmetic(aten.add.Tensor, (_FLOW, torch.zeros(vocab)), {}),
        Arithmetic(aten.slice.Tensor, (_FLOW, -1, 0, 200), {}),
    ):
        assert ShortPath([*tail.steps, step], tail.head).tiles is None


def wide(dtype: torch.dtype = torch.float32, bias: bool = False) -> MuranoModel:
    """A tiny model whose vocabulary has several tiles as they are."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=13_001,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
    )
    hf = LlamaForCausalLM(config)
    if bias:
        hf.lm_head.bias = torch.nn.Parameter(torch.randn(13_001) * 3)
    return MuranoModel(hf.to(dtype), tokenizer=tiny_tokenizer())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_vocabulary_of_three_tiles_as_it_comes(
    dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing set but the model: 700 rows of a vocabulary that no tile divides, beside transformers' own logits."""
    model = wide(dtype, bias)
    ids = torch.randint(16, 250, (10, 35), generator=torch.Generator().manual_seed(2))
    prompts = [Prompt(token_ids=tuple(i), targets=(i[3], 12_999, 13_000)) for i in ids.tolist()]
    widths: list[int] = []
    own = Reduction.add

    def watched(self: Reduction, blocks: Iterable[Tensor], *rest: Any) -> None:
        blocks = list(blocks)
        widths.append(blocks[0].shape[1])
        own(self, blocks, *rest)

    monkeypatch.setattr(Reduction, "add", watched)
    lens = logit_lens(model, prompts, top_k=4)
    assert widths == [4352, 4352, 4297]
    with torch.no_grad():
        logits = model.hf_model(input_ids=ids).logits.float()
    log_probs = logits.double().log_softmax(-1)
    values = logits.topk(4, dim=-1).values
    near = 1e-5 if dtype == torch.float32 else 0.07  # a bfloat16 product of another shape rounds otherwise
    assert (logits.gather(-1, lens.top_ids[-1].long()) - values).abs().max() <= near
    assert (lens.log_normalizer[-1] - logits.logsumexp(-1)).abs().max() <= near
    assert (lens.entropy[-1] + (log_probs.exp() * log_probs).sum(-1)).abs().max() <= 4 * near
    of_targets = torch.tensor([[i[3], 12_999, 13_000] for i in ids.tolist()]).unsqueeze(1).expand(-1, 35, -1)
    assert lens.target_log_probs is not None and lens.target_ranks is not None
    assert (lens.target_log_probs[-1] - log_probs.gather(-1, of_targets)).abs().max() <= 2 * near
    if dtype == torch.float32:
        ranks = (logits.unsqueeze(-2) > logits.gather(-1, of_targets).unsqueeze(-1)).sum(-1)
        assert (lens.target_ranks[-1] - ranks).abs().max() <= 1
        assert (lens.target_ranks[-1] == ranks).float().mean() > 0.99


@pytest.mark.parametrize("product", ["tiles", "onednn"])
def test_what_a_token_will_get_is_foreseen_to_the_bit(product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same product: else nearly all rows of which ranks are asked would be read a second time, whole."""
    model = wide()
    ids = torch.randint(16, 250, (10, 35), generator=torch.Generator().manual_seed(2))
    prompts = [Prompt(token_ids=tuple(i), targets=(i[3], 12_999), foils=(40,)) for i in ids.tolist()]
    relied: list[Tensor] = []
    own = Tiles.read

    def watched(self: Tiles, *args: Any) -> Any:
        read = own(self, *args)
        assert read is not None
        relied.append(read[1])
        return read

    monkeypatch.setattr(Tiles, "read", watched)
    lens = logit_lens(model, prompts, product=product)
    assert torch.cat(relied).float().mean() > 0.99
    assert_alike(lens, logit_lens(model, prompts, product="torch"), 1e-5)


def test_few_rows_and_little_room_are_read_whole() -> None:
    row = torch.empty(1, 49_152)
    assert plan(row, 5, 32 << 20) == (768, 4096)
    assert plan(row, 5, 8 << 20) == (512, 4096)
    assert plan(row, 5, 2 << 20) is None  # no room for enough rows
    assert plan(row, 192, 32 << 20) == (768, 4096)
    assert plan(row, 200, 32 << 20) is None  # so many are sought that whole rows are as good
    assert plan(row.bfloat16(), 5, 8 << 20) == (768, 4096)
    assert plan(torch.empty(1, 8000), 5, 32 << 20) is None  # one tile would be all of it
    assert plan(torch.empty(1, 262_144), 5, 32 << 20) == (768, 4096)


def test_whole_logits_by_tiles_are_the_logits() -> None:
    model = wide()
    tail = model.tail
    assert isinstance(tail, ShortPath) and tail.weight is not None
    rows = torch.randn(3, 32)
    with torch.no_grad():
        found = Tiles(tail, TorchProduct(tail.weight), 256, 4352).logits(rows, torch.empty(1, 13_001))
        assert (found - tail.raw(rows.unsqueeze(0))[0]).abs().max() < 1e-5


def test_a_lens_after_the_unembedding_was_changed_reads_the_new_one() -> None:
    """Products keep the weight they were made for, oneDNN's in an order of its own."""
    model = wide()
    ids = torch.randint(16, 250, (10, 35), generator=torch.Generator().manual_seed(2))
    prompts = [Prompt(token_ids=tuple(i)) for i in ids.tolist()]
    head: Any = model.hf_model.lm_head
    for product in ("tiles", "onednn", "numpy", "torch"):
        logit_lens(model, prompts, product=product)
        with torch.no_grad():
            head.weight.mul_(-0.5)
        assert_alike(logit_lens(model, prompts, product=product), logit_lens(model, prompts, product="torch"), 1e-5)
        head.weight.data.mul_(3.0)  # unseen by torch's count of versions
        assert_alike(logit_lens(model, prompts, product=product), logit_lens(model, prompts, product="torch"), 1e-5)
        head.weight = torch.nn.Parameter(head.weight.detach().flip(0))
        assert_alike(logit_lens(model, prompts, product=product), logit_lens(model, prompts, product="torch"), 1e-5)


@pytest.mark.parametrize("in_bits", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_any_tiles_of_any_rows_reduce_to_the_same(seed: int, in_bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than are kept apart, tiles that are masked whole, a row of nothing but one token, one that is not finite."""
    monkeypatch.setattr(search, "MOST_KEPT", 1)
    generator = torch.Generator().manual_seed(seed)
    n, vocab, k = 7, int(torch.randint(40, 5000, (1,), generator=generator)), 1 + seed % 5
    logits = torch.randn(n, vocab, generator=generator) * 10 ** (seed % 4 - 1)
    logits[1, : vocab // 2] = -torch.inf
    logits[2, 1:] = -torch.inf
    logits[4, vocab // 3] = torch.nan
    logits[5] = logits[5].round()  # many equal ones
    cuts = sorted({0, *(64 * torch.randint(1, -(-vocab // 64), (seed,), generator=generator)).tolist(), vocab})
    tokens = torch.randint(0, vocab, (n, 2), generator=generator)
    if in_bits:
        bits = (logits.double() * LOG2_E).float()
        logits = (bits.double() / LOG2_E).float()
    else:
        bits = logits
    whole = reduce_rows(logits.clone(), k, tokens=tokens)
    reduction = Reduction(Search(n, k, vocab), None, None, tokens, bits.gather(1, tokens), in_bits)
    for first, end in itertools.pairwise(cuts):
        reduction.add([bits[:, first:end].clone()], first)
    found = reduction.stats()
    good = torch.tensor([i for i in range(n) if i != 4])
    assert reduction.sure().tolist() == [i != 4 or not logits[4, tokens[4]].isnan().any() for i in range(n)]
    assert torch.equal(logits.gather(1, found.top_ids)[good], logits.gather(1, whole.top_ids)[good])
    assert all(len(set(row)) == k for row in found.top_ids[good].tolist())
    for name in ("top_probs", "entropy", "log_normalizer", "token_log_probs"):
        one, other = getattr(found, name), getattr(whole, name)
        assert torch.allclose(one[good], other[good], rtol=3e-6, atol=3e-5 if name == "entropy" else 3e-6), name
        assert one[4].isnan().all(), name
    assert found.token_ranks is not None and whole.token_ranks is not None
    assert torch.equal(found.token_ranks[good], whole.token_ranks[good])


@pytest.mark.parametrize("k", [1, 5, 20])
@pytest.mark.parametrize("order", ["falling", "rising", "any", "equal"])
def test_what_is_kept_of_rows_stays_bounded(order: str, k: int) -> None:
    """Rows that rise from piece to piece surpass the bar everywhere; what was surpassed is let go."""
    n, vocab, width = 6, 50_000, 2_048
    x = torch.randn(n, vocab, generator=torch.Generator().manual_seed(0))
    if order != "any":
        x = torch.zeros(n, vocab) if order == "equal" else x.sort(dim=1, descending=order == "falling").values
    found = Search(n, k, vocab)
    most = 0
    for first in range(0, vocab, width):
        piece = x[:, first : first + width]
        for part in piece.split(4):
            assert torch.equal(found.add(part), part.amax(1, keepdim=True))
        found.end_piece(first, piece.shape[1])
        most = max(most, found.n_kept)
    assert most <= (search.MOST_KEPT + 1) * k * n
    values, ids = found.best()
    assert torch.equal(values, x.topk(k, dim=1).values)
    assert torch.equal(x.gather(1, ids), values)
    assert all(len(set(row)) == k for row in ids.tolist())


def test_of_equal_logits_the_lower_id_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole rows as in tiles: bfloat16 has many."""
    logits = torch.zeros(5, 900)
    logits[:, [3, 899, 17, 400]] = 2.0
    logits[:, 600] = 5.0
    expected = [600, 3, 17, 400, 899]
    for width in (900, 256):
        reduction = Reduction(Search(5, 5, 90_000))  # by groups
        for first in range(0, 900, width):
            reduction.add([logits[:, first : first + width].clone()], first)
        assert reduction.stats().top_ids.tolist() == [expected] * 5
    assert reduce_rows(logits.clone(), 5).top_ids.tolist() == [expected] * 5


def test_logits_that_are_not_finite_are_noted() -> None:
    model = wide(bias=True)
    head: Any = model.hf_model.lm_head
    with torch.no_grad():
        head.bias[5000] = torch.inf
    for n in (1, 10):
        with pytest.warns(UserWarning, match="Logits are not finite at L0.resid_post"):
            lens = logit_lens(model, [Prompt(token_ids=tuple(range(20, 55)))] * n)
        assert lens.entropy.isnan().all()
        assert any("Logits are not finite" in note for note in lens.notes)


def test_numbers_and_paths_as_they_are_written(tmp_path: Path) -> None:
    model = held("llama")
    lens = logit_lens(model, "a b", max_chunk_bytes=2.0**25, keep="residuals", checkpoint=str(tmp_path / "c.ckpt"))
    assert torch.equal(lens.top_ids, logit_lens(model, "a b").top_ids)
    with pytest.raises(InputError, match="max_chunk_bytes='1': it must be a whole number"):
        reread(lens, model, max_chunk_bytes="1")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="^reread asks a lens another question, not a MuranoModel: reread.lens, model"):
        reread(model, lens)  # type: ignore[arg-type]
