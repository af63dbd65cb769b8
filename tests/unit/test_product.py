"""Which matrix product a lens uses: the fastest of those that are as accurate as torch's, and torch's own to the bit where it is pinned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from support.reading import fresh, held, own_logits
from torch import Tensor

from murano.errors import InputError
from murano.lens import logit_lens
from murano.model import product
from murano.model.product import NumpyProduct, OnednnProduct, TorchProduct, choose, gather
from murano.prompts import Prompt

Make = Callable[..., product.Product]


def weight_of(vocab: int = 300, d: int = 24) -> Tensor:
    return torch.randn(vocab, d, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("make", [TorchProduct, NumpyProduct, OnednnProduct])
def test_products_of_tiles_are_the_product(make: Make, biased: bool) -> None:
    weight, bias = weight_of(), torch.linspace(-3, 3, 300) if biased else None
    rows = torch.randn(7, 24, generator=torch.Generator().manual_seed(1))
    exact = rows.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    multiply = make(weight, bias)
    for first, width in ((0, 300), (0, 64), (64, 64), (256, 44)):
        for most in (7, 3):  # room for all rows, and for some at a time
            out = torch.full((7, width), torch.nan)
            room = out if most == 7 else torch.full((most, width), torch.nan)
            assert gather(multiply(rows, first, room), out) is out
            assert (out.double() - exact[:, first : first + width]).abs().max() < 1e-5


def stand_ins(monkeypatch: pytest.MonkeyPatch, **libraries: tuple[float, float]) -> None:
    """Libraries that take so many seconds for a product and are off by so much."""

    def make(seconds: float, error: float) -> product.Product:
        def multiply(rows: Tensor, first: int, out: Tensor) -> Iterable[Tensor]:
            for block in TorchProduct(weight_of())(rows, first, out):
                yield block.add_(error)
            time.sleep(seconds)

        return multiply

    made = {name: make(*how) for name, how in libraries.items()}
    own = made.pop("torch")
    monkeypatch.setattr(product, "TorchProduct", lambda weight, bias=None: own)
    monkeypatch.setattr(product, "_others", lambda weight, bias: made)


@pytest.mark.parametrize(
    ("libraries", "best"),
    [
        ({"torch": (0.03, 0.0), "onednn": (0.003, 0.0), "numpy": (0.01, 0.0)}, "onednn"),
        ({"torch": (0.03, 0.0), "onednn": (0.003, 0.1), "numpy": (0.01, 0.0)}, "numpy"),  # the fastest is not accurate
        ({"torch": (0.03, 0.0), "onednn": (0.03, 0.0)}, "tiles"),  # too little to gain
        ({"torch": (0.003, 0.0), "onednn": (0.03, 0.0), "numpy": (0.03, 0.0)}, "tiles"),
    ],
)
def test_the_fastest_accurate_product_is_chosen(
    libraries: dict[str, tuple[float, float]], best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins(monkeypatch, **libraries)
    chosen = choose(weight_of(), None, 64, 100)
    assert chosen.name == best
    accurate = {"tiles" if name == "torch" else name for name, (_, error) in libraries.items() if error == 0.0}
    assert set(chosen.gflops) == accurate
    assert set(chosen.errors) == {"tiles", *set(libraries) - {"torch"}}


def test_what_is_done_once_for_a_tile_is_shared_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing a tile takes longer here than one block gains, as it does for oneDNN, but not longer than two do."""
    firsts: list[int] = []

    def make(packing: float, multiplying: float) -> Any:
        def multiply(rows: Tensor, first: int, out: Tensor) -> Iterable[Tensor]:
            firsts.append(first)
            time.sleep(packing)
            for block in TorchProduct(weight_of())(rows, first, out):
                time.sleep(multiplying)
                yield block

        return multiply

    own, other = make(0.0, 0.05), make(0.06, 0.01)
    monkeypatch.setattr(product, "TorchProduct", lambda weight, bias=None: own)
    monkeypatch.setattr(product, "_others", lambda weight, bias: {"onednn": other})
    assert choose(weight_of(), None, 64, 100).name == "onednn"
    assert firsts[:2] == [0, 0]  # where errors are looked at
    assert firsts[2:] == [(0, 100, 200)[turn % 3] for turn in range(len(firsts) - 2)]  # none of them in cache
    assert choose(weight_of(), None, 64, 300).name == "torch"  # whole rows come one block at a time


def test_a_product_that_can_not_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="product='onedn' is unknown. Did you mean 'onednn'"):
        choose(weight_of(), None, 4, 300, "onedn")
    with pytest.raises(
        InputError, match="product='numpy' can't be had for this unembedding .torch.bfloat16, cpu.. Use 'torch'"
    ):
        choose(weight_of().bfloat16(), None, 4, 300, "numpy")
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", None)  # another build of torch lacks it

    def lacking(*args: Any, **kwargs: Any) -> None:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    monkeypatch.setattr(product, "OnednnProduct", lambda *args, **kwargs: lacking)
    assert set(choose(weight_of(), None, 64, 100).gflops) == {"tiles", "numpy"}
    with pytest.raises(InputError, match="product='onednn' can't be had"):
        choose(weight_of(), None, 4, 300, "onednn")
    assert choose(weight_of().bfloat16(), None, 4, 300).name == "torch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gptj", "phi", "gemma2", "cohere"])  # with a bias, a soft-cap, a scale
def test_torch_pinned_at_equal_shapes_is_the_model_to_the_bit(family: str, dtype: torch.dtype) -> None:
    model = held(family, dtype)
    ids = torch.randint(16, model.vocab_size, (1, 9), generator=torch.Generator().manual_seed(3))
    lens = logit_lens(model, [Prompt(token_ids=tuple(ids[0].tolist()))], layers="last", keep="logits", product="torch")
    assert lens.logits is not None
    assert torch.equal(lens.logits[0], own_logits(model.hf_model, ids).float())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_packed_weight_is_packed_anew_when_it_was_written_to_unseen(family: str) -> None:
    model = fresh(family)
    prompt = [Prompt(token_ids=tuple(range(20, 29)))]
    weight: Any = model.tail.weight
    for change in (lambda w: w.flip(0), lambda w: 1.5 * w, lambda w: w):
        weight.data.copy_(change(weight.data))
        packed, own = (logit_lens(model, prompt, product=name) for name in ("onednn", "torch"))
        assert torch.allclose(packed.top_probs, own.top_probs, atol=1e-5)
        assert torch.equal(packed.top_ids, own.top_ids)


def test_slices_are_as_large_as_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width = 64, 300
    sizes = (4 * 8 * width, 4 * rows * width)
    monkeypatch.setattr(product, "CPU_SLICE_BYTES", sizes[0])
    monkeypatch.setattr(product, "LARGE_SLICE_BYTES", sizes[1])
    for slow in sizes:

        class Slow(product.Reduction):
            def add(self, blocks: Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
                assert self.scratch is not None
                time.sleep(0.02 if self.scratch.numel() * 4 == slow else 0.001)  # noqa: B023

        monkeypatch.setattr(product, "Reduction", Slow)
        assert choose(weight_of(), None, rows, width).slice_bytes == sum(sizes) - slow
