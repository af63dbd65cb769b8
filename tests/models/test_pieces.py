"""A long prompt whose MLPs take a piece at a time is read as the whole prompt is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.reading import block_names, fresh, held, ids_of, own_stream
from test_families import READ
from torch import Tensor, nn

import murano.model
from murano import follow_generation
from murano.lens import logit_lens
from murano.model import pieces

#: No module in their blocks reads each position by itself: experts, convolutions, maps that stand alone, an MLP that adds the stream.
WHOLE = {"bart", "bloom", "mamba", "mixtral", "mpt", "opt", "rwkv", "whisper"}
CUT = [
    "llama",
    "gpt2",
    "gptj",
    "falcon",
    "gemma2",
    "phi",
    "qwen3",
    "olmo2",
    "cohere",
    "deepseek_v3",
    "granite",
    "t5gemma",
]


def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(murano.model, "LONG", 4)
    monkeypatch.setattr(pieces, "PIECE", 3)


@pytest.mark.parametrize("family", READ)
def test_every_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = held(family)
    ids = ids_of(model, seed=12)[:1]
    stream, logits = own_stream(model.hf_model, ids, block_names(model))
    short_pieces(monkeypatch)
    names = {id(module): name for name, module in model.hf_model.named_modules()}
    cut = [names[id(module)] for module in model._positionwise]
    assert bool(cut) == (family not in WHOLE) or family not in {*CUT, *WHOLE}
    lens = logit_lens(model, ids.tolist(), keep="residuals")
    assert lens.residuals is not None
    for mine, theirs in zip(lens.residuals, stream, strict=True):
        assert (mine - theirs).abs().max() <= 2e-5 * max(1.0, float(theirs.abs().max()))
    assert (lens.log_normalizer[-1] - logits.logsumexp(-1)).abs().max() < 1e-4
    assert not any("forward" in module.__dict__ for module in model._positionwise)


class Sized(nn.Module):
    """An activation that notes how many positions it is given."""

    def __init__(self, own: nn.Module, sizes: list[int]) -> None:
        super().__init__()
        self.own, self.sizes = own, sizes

    def forward(self, x: Tensor) -> Any:
        self.sizes.append(x.shape[1])
        return self.own(x)


def seen_by(module: nn.Module, seen: list[int]) -> Any:
    return module.register_forward_hook(lambda _, args, out: seen.append(args[0].shape[1]))


def test_a_hook_sees_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("llama")
    logit_lens(model, [[20, 21]])  # all proofs are made
    short_pieces(monkeypatch)
    mlps: list[Any] = model._positionwise
    assert [type(mlp).__name__ for mlp in mlps] == ["LlamaMLP"] * 3
    outside: list[int] = []
    inside: list[int] = []
    beside: list[int] = []
    sizes: list[int] = []
    mlps[2].act_fn = Sized(mlps[2].act_fn, sizes)
    hooks = [seen_by(mlps[0], outside), seen_by(mlps[1].up_proj, inside), seen_by(mlps[1].down_proj, beside)]
    logit_lens(model, [list(range(20, 31))])
    assert (outside, inside, beside, sizes) == ([11], [11], [11], [3, 3, 3, 2])
    for hook in hooks:
        hook.remove()
    logit_lens(model, [list(range(20, 24))])  # no long prompt
    assert sizes == [3, 3, 3, 2, 4]


class Shifted(nn.Module):
    """Reads the position before as well."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.up_proj, self.down_proj = mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        back = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        out: Tensor = self.down_proj(self.up_proj(x + back).relu())
        return out


class Strict(Shifted):
    """Takes no short prompt."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < 7:
            raise ValueError(f"{x.shape[1]} positions")
        return x


@pytest.mark.parametrize("other", [Shifted, Strict])
def test_what_is_not_the_same_in_pieces_runs_whole(other: type[nn.Module]) -> None:
    model = fresh("llama")
    layers: Any = model.hf_model.get_submodule("model.layers")
    layers[1].mlp = other(layers[1].mlp)
    assert model._positionwise == [layers[0].mlp, layers[2].mlp]


def test_a_forward_that_was_replaced_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """As accelerate does where it moves weights about."""
    model = fresh("llama")
    short_pieces(monkeypatch)
    plain = logit_lens(model, [list(range(20, 31))])
    calls: list[int] = []
    for mlp in model._positionwise:
        own = mlp.forward

        def moved(x: Tensor, own: Any = own) -> Any:
            calls.append(x.shape[1])
            return own(x)

        monkeypatch.setattr(mlp, "forward", moved)
    again = logit_lens(model, [list(range(20, 31))])
    assert calls == [3, 3, 3, 2] * 3
    assert torch.equal(plain.top_probs, again.top_probs)
    assert all(mlp.__dict__["forward"].__name__ == "moved" for mlp in model._positionwise)


def test_what_a_long_prompt_has_freed_is_given_back_around_every_block_and_before_its_mlp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = fresh("llama")
    given: list[str] = []
    monkeypatch.setattr(pieces, "give_back", lambda: given.append("freed"))
    logit_lens(model, [list(range(20, 31))], layers=[0])
    assert given == []
    short_pieces(monkeypatch)
    logit_lens(model, [list(range(20, 31))], layers=[0])
    assert given == ["freed"] * 3 * 3
    logit_lens(model, [list(range(20, 24))], layers=[0])  # no long prompt
    assert given == ["freed"] * 3 * 3


def test_a_generation_of_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("gpt2")
    prompt = [list(range(20, 31))]
    whole = follow_generation(model, prompt, max_new_tokens=4)
    short_pieces(monkeypatch)
    sizes: list[int] = []
    mlp: Any = model._positionwise[0]
    mlp.act = Sized(mlp.act, sizes)
    cut = follow_generation(model, prompt, max_new_tokens=4)
    assert sizes == [3, 3, 3, 2, 1, 1, 1]
    assert torch.equal(whole.top_ids, cut.top_ids)
    assert (whole.top_probs - cut.top_probs).abs().max() < 1e-5
