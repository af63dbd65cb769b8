"""capture: the stream by address, each beside a hook that knows nothing of Murano."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.reading import block_names, forwards, fresh, held, ids_of, own_logits
from support.tiny_models import tiny_config
from support.tiny_tokenizer import tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from murano.address import Address
from murano.errors import InputError
from murano.lens import logit_lens
from murano.model import MuranoModel

# Family → names of its embedding row's consumer list, final norm, head; written by hand from transformers' own code.
PARTS = {
    "gpt2": ("transformer.h", "transformer.ln_f", "lm_head"),
    "llama": ("model.layers", "model.norm", "lm_head"),
    "bloom": ("transformer.h", "transformer.ln_f", "lm_head"),
    "gpt_neox": ("gpt_neox.layers", "gpt_neox.final_layer_norm", "lm_head"),
    "gemma2": ("model.layers", "model.norm", "lm_head"),
    "mamba": ("backbone.layers", "backbone.norm_f", "lm_head"),
    "opt": ("model.decoder.layers", "model.decoder.final_layer_norm", "lm_head"),
    "cohere": ("model.layers", "model.norm", "lm_head"),
    "rwkv": ("rwkv.blocks", "rwkv.ln_out", "head"),
}


def first(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        value = value[0]
    return value


def watch(model: Any, ids: Tensor, layers: str, norm: str, head: str) -> tuple[dict[str, Tensor], Tensor]:
    seen: dict[str, Tensor] = {}
    handles = []

    def before(name: str) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any) -> None:
            seen[name] = first(args or list(kwargs.values())).clone()

        return hook

    def after(name: str) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            seen[name] = first(output).clone()

        return hook

    for index, block in enumerate(model.get_submodule(layers)):
        handles.append(block.register_forward_pre_hook(before(f"L{index}.resid_pre"), with_kwargs=True))
        handles.append(block.register_forward_hook(after(f"L{index}.resid_post")))
    handles.append(model.get_submodule(norm).register_forward_hook(after("ln_final")))
    handles.append(model.get_submodule(head).register_forward_hook(after("lm_head")))
    try:
        return seen, own_logits(model, ids)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("family", sorted(PARTS))
def test_every_place_beside_a_plain_hook(family: str) -> None:
    model = held(family)
    ids = ids_of(model)
    seen, logits = watch(model.hf_model, ids, *PARTS[family])
    seen |= {"embeddings": seen["L0.resid_pre"], "logits": logits}
    assert len(seen) == 2 * model.n_layers + 4
    captured = model.capture(ids.tolist(), sorted(seen))
    assert [str(address) for address in captured] == sorted(seen)
    for address, value in captured.items():
        assert torch.equal(value, seen[str(address)].reshape(value.shape)), address
    differs = family in ("gemma2", "cohere")
    assert torch.equal(captured[Address(None, "lm_head")], captured[Address(None, "logits")]) != differs
    for name, value in seen.items():  # one alone, when the forward is stopped early, is the same
        (alone,) = model.capture(ids.tolist(), name).values()
        assert torch.equal(alone, value.reshape(alone.shape)), name


def test_the_embeddings_are_the_tokens_rows() -> None:
    model = held("llama")
    ids = ids_of(model)
    (rows,) = model.capture(ids.tolist(), "embeddings").values()
    assert torch.equal(rows, model.hf_model.model.embed_tokens.weight[ids])
    gpt2 = held("gpt2")
    (rows,) = gpt2.capture(ids.tolist(), "embeddings").values()
    body = gpt2.hf_model.transformer
    assert torch.equal(rows, body.wte.weight[ids] + body.wpe.weight[: ids.shape[1]])


@pytest.mark.parametrize(
    ("family", "reader"),
    [
        ("gpt2", "transformer.h.{}.ln_2"),
        ("llama", "model.layers.{}.post_attention_layernorm"),
        ("gemma2", "model.layers.{}.pre_feedforward_layernorm"),
        ("qwen3", "model.layers.{}.post_attention_layernorm"),
    ],
)
def test_between_attention_and_mlp(family: str, reader: str) -> None:
    model = held(family)
    ids = ids_of(model)
    seen: list[Tensor] = []
    names = [f"L{i}.resid_mid" for i in range(model.n_layers)]
    captured = list(model.capture(ids.tolist(), names).values())
    handles = [
        model.hf_model.get_submodule(reader.format(i)).register_forward_pre_hook(
            lambda _m, args: seen.append(args[0].clone())
        )
        for i in range(model.n_layers)
    ]
    own_logits(model.hf_model, ids)
    for handle in handles:
        handle.remove()
    for mine, theirs in zip(captured, seen, strict=True):
        assert torch.equal(mine, theirs)
    lens = logit_lens(model, ids.tolist(), layers=names)
    expected = model.decode(torch.stack(seen)).softmax(-1)
    assert (lens.top_probs - expected.topk(5).values).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["gpt_neox", "falcon", "cohere", "phi", "gptj", "mamba"])
def test_no_place_between_attention_and_mlp_where_they_run_side_by_side(family: str) -> None:
    model = held(family)
    name = type(model.hf_model).__name__
    for read in (
        lambda: model.capture([[20, 21]], "L1.resid_mid"),
        lambda: logit_lens(model, [[20, 21]], layers="L1.resid_mid"),
    ):
        with pytest.raises(
            InputError, match=rf"'L1\.resid_mid' does not exist in {name}: no layer.*Use resid_pre or resid_post"
        ):
            read()


def test_neox_with_sequential_blocks_has_one() -> None:
    config = tiny_config("gpt_neox")
    config.use_parallel_residual = False  # type: ignore[attr-defined]
    model = MuranoModel(AutoModelForCausalLM.from_config(config).eval(), tokenizer=tiny_tokenizer())
    names = ["L0.resid_pre", "L0.resid_mid", "L0.resid_post"]
    pre, mid, post = model.capture([[20, 21, 22]], names).values()
    mlp = model.hf_model.gpt_neox.layers[0]
    with torch.no_grad():
        assert (mid + mlp.mlp(mlp.post_attention_layernorm(mid)) - post).abs().max() < 1e-6
    assert (mid - pre).abs().max() > 1e-4


def test_a_place_that_some_layers_have_is_refused_in_the_others() -> None:
    """gpt_neox_japanese adds its attention's bias in the last block only; qwen4_exp keeps the plain form in the first."""
    model = held("qwen4_exp_text")
    with pytest.raises(InputError, match=r"'L2\.resid_mid' does not exist in Qwen4ExpForCausalLM: layers \[0\] of it"):
        model.capture([[20, 21, 22]], "L2.resid_mid")


def test_no_final_norm_is_said() -> None:
    with pytest.raises(InputError, match="'ln_final' does not exist in BartForCausalLM"):
        held("bart").capture([[20, 21]], "ln_final")


@pytest.mark.parametrize("address", ["L0.attn_out", "L1.mlp_out", "attention_output[0]"])
def test_what_is_not_the_stream_is_refused(address: str) -> None:
    model = held("llama")
    assert model.check_readout().exact
    with (
        forwards(model.hf_model) as ran,
        pytest.raises(
            InputError,
            match="is not on the residual stream. Use resid_pre, resid_mid or resid_post of a layer, "
            "or embeddings, ln_final, lm_head or logits.",
        ),
    ):
        model.capture([[20, 21]], address)
    assert ran == [0]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("L3", "Layer 3 is outside the model, which has 3 layers: use 0 to 2"),
        (-4, "Layer -4 is outside the model"),
        ("resid_past.1", "Unknown component 'resid_past'. Did you mean 'resid_post'?"),
        ("L1.embeddings", "belongs to the whole model and takes no layer"),
        ("resid_post", "needs a layer: write 'L3.resid_post'"),
    ],
)
def test_an_address_that_does_not_exist(address: Any, message: str) -> None:
    model = held("llama")
    assert model.check_readout().exact
    with forwards(model.hf_model) as ran, pytest.raises(InputError) as caught:
        model.capture([[20, 21]], address)
    assert message in str(caught.value)
    assert ran == [0]


def test_prompts_and_addresses_keep_their_order_and_padding_is_nan() -> None:
    model = held("gpt2")
    prompts = [[20], [30, 31, 32, 33], [40, 41]]
    captured = model.capture(prompts, [2, "embeddings", "L0.resid_post", -1])
    assert [str(address) for address in captured] == ["L2.resid_post", "embeddings", "L0.resid_post"]
    for address, rows in captured.items():
        assert rows.shape == (3, 4, 32)
        for prompt, ids in enumerate(prompts):
            (alone,) = model.capture([ids], address).values()
            assert (rows[prompt, -len(ids) :] - alone[0]).abs().max() < 1e-5
            assert rows[prompt, : 4 - len(ids)].isnan().all()
    assert not captured[Address(0)].requires_grad


def test_what_was_asked_for_is_found_under_any_of_its_names() -> None:
    model = held("llama")
    captured = model.capture([[20, 21]], ["L2.resid_post", "embeddings", "logits"])
    rows = captured[Address(2)]
    assert rows.shape == (1, 2, 32)
    for name in ("L2.resid_post", "resid_post.2", "block_output[2]", 2, -1, (2, "resid_post"), (-1, "resid_post")):
        assert captured[name] is rows
        assert name in captured
    assert captured["logits"].shape == (1, 2, 256)
    assert torch.equal(captured["embeddings"], model.hf_model.model.embed_tokens.weight[None, [20, 21]])
    assert list(captured) == [Address(2), Address(None, "embeddings"), Address(None, "logits")]
    assert captured.get("L0.resid_post") is None
    with pytest.raises(
        InputError, match="'L0.resid_post' was not captured. Captured: L2.resid_post, embeddings, logits.$"
    ):
        captured["L0.resid_post"]
    with pytest.raises(KeyError):
        captured[0]
    with pytest.raises(InputError, match="Unknown component 'resid_past'"):
        captured["L0.resid_past"]
    assert repr(captured) == "Captured(L2.resid_post: [1, 2, 32], embeddings: [1, 2, 32], logits: [1, 2, 256])"


def test_a_pair_is_one_address() -> None:
    model = held("llama")
    assert list(model.capture([[20, 21]], (1, "resid_pre"))) == [Address(1, "resid_pre")]
    assert list(model.capture([[20, 21]], (1, 2))) == [Address(1), Address(2)]
    assert list(model.capture([[20, 21]], ("embeddings", "L1"))) == [Address(None, "embeddings"), Address(1)]


def test_only_what_is_needed_runs() -> None:
    model = held("llama")
    assert model.check_readout().exact
    ran: list[str] = []
    handles = [
        model.hf_model.get_submodule(name).register_forward_pre_hook(lambda *_, _name=name: ran.append(_name))
        for name in [*block_names(model), "lm_head"]
    ]
    model.capture([[20, 21, 22]], "L0.resid_post")
    assert ran == ["model.layers.0"]
    ran.clear()
    model.capture([[20, 21, 22]], ["L1.resid_pre", "embeddings"])
    assert ran in (["model.layers.0"], ["model.layers.0", "model.layers.1"])
    ran.clear()
    model.capture([[20, 21, 22]], "logits")
    assert ran[-1] == "lm_head"
    for handle in handles:
        handle.remove()


def test_what_is_captured_is_the_users_own_to_change() -> None:
    model = fresh("llama")
    ids = [[20, 21, 22]]
    captured = model.capture(ids, ["embeddings", 0, 1])
    copies = {address: rows.clone() for address, rows in captured.items()}
    weight = model.hf_model.model.embed_tokens.weight.clone()
    for rows in captured.values():
        rows.zero_()
    assert torch.equal(model.hf_model.model.embed_tokens.weight, weight)
    for address, rows in model.capture(ids, ["embeddings", 0, 1]).items():
        assert torch.equal(rows, copies[address])


def test_parallel_streams_are_captured_side_by_side() -> None:
    """gemma3n keeps four streams: a row is all of them, and decodes to the model's own logits."""
    model = held("gemma3n_text")
    ids = ids_of(model)
    (rows,) = model.capture(ids.tolist(), -1).values()
    assert rows.shape == (*ids.shape, 4 * 32)
    assert model.d_model == 128
    assert torch.equal(model.decode(rows), own_logits(model.hf_model, ids))


def test_a_block_that_runs_twice_has_two_layers() -> None:
    model = held("hrm_text")
    names = block_names(model)
    assert len(names) > len(set(names))
    assert model.n_layers == len(names)
    captured = model.capture([[20, 21, 22]], range(model.n_layers))
    rows = list(captured.values())
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(rows))
