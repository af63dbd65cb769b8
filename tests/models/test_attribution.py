"""Logit attribution: the sum is the model's own logit in every family that can be split, and each share is what it is said to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.reading import fresh, held, ids_of, own_logits
from support.tiny_models import NUM_HEADS, causal_lm_types
from torch import Tensor

from murano.address import Address
from murano.artifacts.logit_attribution import LogitAttributionResult, summed
from murano.artifacts.store import load_artifact, save_artifact
from murano.attribution import logit_attribution
from murano.errors import InputError, ReadoutError, UnsupportedModelError
from murano.model import MuranoModel
from murano.prompts import Prompt

# What a logit reads is no direction of one stream: a head of several layers, a replayed tail, or no readout at all.
REFUSED = {
    *(
        "bert",
        "big_bird",
        "camembert",
        "cpmant",
        "data2vec-text",
        "deepseek_v4",
        "electra",
        "ernie",
        "gemma3n",
        "gemma3n_text",
    ),
    *("gemma4_assistant", "gemma4_unified_assistant", "hy_v4", "inkling2_loop_text", "inkling2_text", "megatron-bert"),
    *("modernbert-decoder", "prophetnet", "qwen4_exp", "qwen4_exp_text", "reformer", "rembert", "roberta"),
    *("roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
}
# Blocks that norm the sum, start from something else than the last one left, or add what no module returns.
BY_LAYER_ONLY = {
    *(
        "bart",
        "bert-generation",
        "blenderbot-small",
        "blt",
        "dory",
        "git",
        "gpt_neox_japanese",
        "hrm_text",
        "inkling_text",
    ),
    *("marian", "minimax", "mvp", "openai-gpt", "plbart", "rwkv", "trocr", "zaya"),
}
NO_HEADS = {"falcon_mamba", "jetmoe", "mamba", "zamba"}
WHOLE = [f for f in causal_lm_types() if f not in REFUSED | BY_LAYER_ONLY]


def prompts_of(model: MuranoModel, lengths: tuple[int, ...] = (8, 5, 8)) -> list[Prompt]:
    """Prompts of different lengths with a target and a foil each."""
    ids = ids_of(model, batch=len(lengths), length=max(lengths)).tolist()
    rows = zip(ids, lengths, strict=True)
    return [Prompt(token_ids=tuple(row[:n]), targets=(30 + i,), foils=(60 + i,)) for i, (row, n) in enumerate(rows)]


def own(model: MuranoModel, prompts: list[Prompt]) -> Tensor:
    """transformers' own logits of each prompt's target and foil, each prompt alone."""
    last = [own_logits(model.hf_model, torch.tensor([p.token_ids]))[0, -1] for p in prompts]
    return torch.stack([row[[p.targets[0], p.foils[0]]] for row, p in zip(last, prompts, strict=True)])


def test_how_many_families_are_split() -> None:
    assert len(WHOLE) >= 145


@pytest.mark.parametrize("family", [*WHOLE, *sorted(BY_LAYER_ONLY)])
def test_contributions_are_the_models_own_logit(family: str) -> None:
    model = held(family)
    prompts = prompts_of(model)
    layers = logit_attribution(model, prompts, by="layer")
    torch.testing.assert_close(layers.model_logits[:, 0], own(model, prompts), atol=1e-5, rtol=0)
    assert layers.leftover.abs().max() < 1e-5
    if not layers.cap:
        assert torch.equal(layers.logits, layers.model_logits)
    if family in BY_LAYER_ONLY:
        with pytest.raises(InputError, match="can't be attributed by component.*Use by='layer'"):
            logit_attribution(model, prompts)
        return
    found = logit_attribution(model, prompts)
    assert found.leftover.abs().max() < 1e-5
    torch.testing.assert_close(found.logits, layers.logits)
    # A block is its components.
    for layer in range(model.n_layers):
        parts = [i for i, a in enumerate(found.components) if a.layer == layer]
        whole = layers.contributions[..., layers.components.index(Address(layer, "layer_out"))]
        torch.testing.assert_close(found.contributions[..., parts].sum(-1), whole, atol=1e-5, rtol=0)
    if family in NO_HEADS:
        with pytest.raises(InputError, match=f"{type(model.hf_model).__name__} has no heads"):
            logit_attribution(model, prompts, by="head")
        return
    heads = logit_attribution(model, prompts, by="head")
    names, added = summed(heads)
    assert names == found.components
    torch.testing.assert_close(added, found.contributions, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_refused_by_name(family: str) -> None:
    model = held(family)
    with pytest.raises(UnsupportedModelError) as caught:
        logit_attribution(model, [Prompt(token_ids=(20, 21, 22), targets=(30,))])
    assert type(model.hf_model).__name__ in str(caught.value)


def caught(module: Any, given: bool) -> list[Tensor]:
    """What a module is given or returns, by a plain hook."""
    seen: list[Tensor] = []

    def before(_: Any, args: Any, kwargs: Any) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"]).detach().clone())

    def after(_: Any, args: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output).detach().clone())

    module.register_forward_pre_hook(before, with_kwargs=True) if given else module.register_forward_hook(after)
    return seen


def test_llama_by_hand() -> None:
    model = fresh("llama")
    hf: Any = model.hf_model
    prompt = prompts_of(model)[0]
    found = logit_attribution(model, [prompt], by="head")
    layer = hf.model.layers[1]
    attention, inputs, mlp = (
        caught(layer.self_attn, False),
        caught(layer.self_attn.o_proj, True),
        caught(layer.mlp, False),
    )
    final = caught(hf.model.norm, True)
    with torch.no_grad():
        hf(torch.tensor([prompt.token_ids]))
        row = final[0][0, -1].double()
        scale = (row.pow(2).mean() + hf.config.rms_norm_eps).rsqrt()
        direction = hf.lm_head.weight[[30, 60]].double() * hf.model.norm.weight.double() * scale
        width = inputs[0].shape[-1] // NUM_HEADS
        heads = torch.stack(
            [
                direction @ (layer.self_attn.o_proj.weight[:, h * width : (h + 1) * width].double() @ x.double())
                for h, x in enumerate(inputs[0][0, -1].view(NUM_HEADS, width))
            ],
            dim=-1,
        )
    names = [Address(1, "attn_out", f"h{h}") for h in range(NUM_HEADS)]
    values = found.contributions[0, 0][:, [found.components.index(a) for a in names]].double()
    torch.testing.assert_close(values, heads, atol=1e-6, rtol=0)
    torch.testing.assert_close(heads.sum(-1), direction @ attention[0][0, -1].double(), atol=1e-6, rtol=0)
    written = found.contributions[0, 0][:, found.components.index(Address(1, "mlp_out"))].double()
    torch.testing.assert_close(written, direction @ mlp[0][0, -1].double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "bloom", "olmo2"])
def test_knocking_a_component_out_of_the_final_residual(family: str) -> None:
    """With the norm's scale as it was, taking out what a block wrote changes the logit by what was attributed to it."""
    model = held(family)
    prompt = prompts_of(model)[0]
    found = logit_attribution(model, [prompt])
    part = model.parts.of(model.n_layers - 1, "mlp_out")[0]
    module = part.place.module
    outputs: list[Tensor] = []
    last = Address(model.n_layers - 1)
    handle = module.register_forward_hook(lambda _m, _a, out: outputs.append(out.detach().clone()))
    (stream,) = model.capture([list(prompt.token_ids)], last).values()
    handle.remove()
    final, wrote = stream[0, -1], (part.scale * outputs[part.place.call].double()).float().reshape(stream.shape)[0, -1]
    norm = model.hf_model.get_submodule(model.anatomy.final_norm or "")
    kept = norm(final)
    centred = family in ("gpt2", "bloom")

    def scale(x: Tensor) -> Tensor:
        x = x - x.mean() if centred else x
        return (x.pow(2).mean() + 1e-6).sqrt() if not centred else (x.pow(2).mean() + 1e-5).sqrt()

    without = final - wrote
    moved = norm(without)
    bias = getattr(norm, "bias", None) if centred else None
    bias = torch.zeros_like(kept) if bias is None else bias
    frozen = (moved - bias) * scale(without) / scale(
        final
    ) + bias  # the norm of what is left, by the scale of the whole
    head = model.hf_model.get_output_embeddings().weight[[30, 60]]
    torch.testing.assert_close(
        head @ (kept - frozen),
        found.contributions[0, 0][:, found.components.index(Address(model.n_layers - 1, "mlp_out"))],
        atol=2e-5,
        rtol=0,
    )


def test_neurons_are_the_largest_of_the_mlp() -> None:
    model = fresh("llama")
    hf: Any = model.hf_model
    prompts = prompts_of(model)
    found = logit_attribution(model, prompts, by="neuron_topk", neurons=7)
    assert found.neurons is not None and found.neuron_index is not None
    inputs = [caught(layer.mlp.down_proj, True) for layer in hf.model.layers]
    final = caught(hf.model.norm, True)
    for i, prompt in enumerate(prompts):
        for seen in (*inputs, final):
            seen.clear()
        with torch.no_grad():
            hf(torch.tensor([prompt.token_ids]))
            row = final[0][0, -1].double()
            scale = (row.pow(2).mean() + hf.config.rms_norm_eps).rsqrt()
            rows = hf.lm_head.weight[[30 + i, 60 + i]].double() * hf.model.norm.weight.double() * scale
            each = torch.stack(
                [
                    (rows @ layer.mlp.down_proj.weight.double()) * x[0][0, -1].double()
                    for layer, x in zip(hf.model.layers, inputs, strict=True)
                ]
            )  # layer answer neuron
        difference = each[:, 0] - each[:, 1]
        best = difference.abs().flatten().topk(7)
        layer, neuron = best.indices // each.shape[-1], best.indices % each.shape[-1]
        assert found.neuron_index[i, 0].tolist() == torch.stack([layer, neuron], dim=-1).tolist()
        mine = found.neurons[i, 0]
        torch.testing.assert_close((mine[0] - mine[1]).double(), difference[layer, neuron], atol=1e-6, rtol=0)


def test_positions_and_batches_do_not_change_the_numbers() -> None:
    model = held("gemma2")
    prompts = prompts_of(model)
    whole = logit_attribution(model, prompts, by="head", positions="all")
    assert whole.contributions.shape[:3] == (3, 8, 2)
    assert whole.attention_mask.sum().item() == 21
    assert bool(whole.contributions[1, :3].isnan().all()) and not bool(whole.contributions[1, 3:].isnan().any())
    assert whole.leftover[whole.attention_mask].abs().max() < 1e-5
    last = logit_attribution(model, prompts, by="head")
    torch.testing.assert_close(last.contributions[:, -1], whole.contributions[:, -1], atol=1e-6, rtol=0)
    single = logit_attribution(model, prompts, by="head", positions=[-2, 0], max_batch_tokens=1)
    torch.testing.assert_close(single.contributions[:, 0], whole.contributions[:, -2], atol=1e-6, rtol=0)
    torch.testing.assert_close(single.contributions[0, 1], whole.contributions[0, 0], atol=1e-6, rtol=0)
    torch.testing.assert_close(single.contributions[1, 1], whole.contributions[1, 3], atol=1e-6, rtol=0)


def test_a_soft_cap_is_left_out_and_said() -> None:
    model = held("gemma2")
    found = logit_attribution(model, prompts_of(model))
    assert found.cap == "div(x, 2.0) → tanh(x) → mul(x, 2.0)"
    torch.testing.assert_close(torch.tanh(found.logits / 2.0) * 2.0, found.model_logits)
    assert "before the soft-cap" in found.top().what
    assert "before the soft-cap" in found.table().how
    assert logit_attribution(held("llama"), prompts_of(held("llama"))).cap == ""


def test_multipliers_are_part_of_the_sum() -> None:
    for family in ("cohere", "granite", "minicpm3", "hyperclovax"):
        model = held(family)
        found = logit_attribution(model, prompts_of(model))
        assert found.cap == ""
        torch.testing.assert_close(found.contributions.sum(-1)[:, 0], own(model, prompts_of(model)), atol=1e-5, rtol=0)


def test_half_precision_leaves_its_own_rounding() -> None:
    model = fresh("llama", torch.bfloat16)
    found = logit_attribution(model, prompts_of(model))
    layers = logit_attribution(model, prompts_of(model), by="layer")
    assert layers.leftover.abs().max() < 0.02
    assert found.leftover.abs().max() < 0.05


def test_a_model_that_was_changed_is_found_out() -> None:
    model = fresh("llama")
    prompts = prompts_of(model)
    logit_attribution(model, prompts)
    hf: Any = model.hf_model
    hf.model.layers[1].register_forward_hook(lambda _m, _a, out: out + 1.0)
    with pytest.raises(ReadoutError, match="of a logit over, in the batch of prompt 0"):
        logit_attribution(model, prompts)


# Bad input


def test_what_can_not_be_attributed() -> None:
    model = held("llama")
    good = prompts_of(model)
    cases: list[tuple[dict[str, Any], Any, str]] = [
        ({}, [good[0], Prompt(token_ids=(20, 21))], r"Prompt 1 has no target.*LoadPrompts\(prompts, targets=\[…\]\)"),
        ({"targets": [30, None]}, good[:2], "Prompt 1 has no target"),
        ({"targets": [30], "foils": [30]}, good[:1], "Prompt 0 can't be read .*is the target itself"),
        ({"positions": [5]}, good, "Prompt 1 has 5 tokens, so it has no position 5"),
        ({"positions": [-9]}, good, "Prompt 0 has 8 tokens, so it has no position -9"),
        ({"by": "heads"}, good, "by='heads' is unknown. Did you mean 'head'?"),
        ({"by": "neuron_topk", "neurons": 0}, good, "neurons=0"),
        ({"positions": "first"}, good, "positions='first' is unknown"),
        ({"targets": [9999]}, good[:1], "outside the vocabulary"),
    ]
    for options, prompts, message in cases:
        with pytest.raises(InputError, match=message):
            logit_attribution(model, prompts, **options)


def test_families_without_neurons() -> None:
    model = held("mixtral")
    with pytest.raises(InputError, match="MixtralForCausalLM has no neurons"):
        logit_attribution(model, prompts_of(model), by="neuron_topk")


# The artifact


def attributed(by: str = "head") -> LogitAttributionResult:
    model = held("gpt2")
    return logit_attribution(model, prompts_of(model), by=by)


@pytest.mark.parametrize("by", ["layer", "component", "head", "neuron_topk"])
def test_saved_and_loaded(by: str, tmp_path: Path) -> None:
    found = attributed(by)
    again = load_artifact(save_artifact(tmp_path / "a.pt", found))
    assert isinstance(again, LogitAttributionResult)
    for name, value in vars(found).items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(getattr(again, name), value, atol=0, rtol=0, equal_nan=True)
        elif name not in ("words", "extra"):
            assert getattr(again, name) == value, name
    assert again.words[30] == found.words[30]


def test_what_it_says() -> None:
    found = attributed()
    assert repr(found).startswith("LogitAttributionResult(")
    assert [str(a) for a in found.components[:6]] == [
        "embeddings",
        *(f"L0.attn_out.h{i}" for i in range(4)),
        "L0.attn_out.rest",
    ]
    assert str(found.components[-1]) == "bias"
    assert found.default_of == "difference"
    torch.testing.assert_close(found.values("difference"), found.values("target") - found.values("foil"))
    torch.testing.assert_close(found.values().sum(-1), found.total(), atol=1e-5, rtol=0)
    with pytest.raises(InputError, match="of='both' is unknown"):
        found.values("both")
    with pytest.raises(InputError, match="Position 1 was not read"):
        found.values(position=1)


def test_means_and_the_top() -> None:
    found = attributed("component")
    summary = found.table().mean()
    torch.testing.assert_close(summary.mean[0], found.values().double().mean(0).float())
    assert bool((summary.low <= summary.mean).all()) and bool((summary.mean <= summary.high).all())
    top = found.top(3)
    order = found.values().double().mean(0).abs().argsort(descending=True)[:3]
    assert top.names == tuple(str(found.components[i]) for i in order)
    assert "mean of 3 prompts" in repr(top)
    one = found.top(2, prompt=1, of="target")
    assert one.total == pytest.approx(float(found.logits[1, 0, 0]))
    assert repr(one).splitlines()[0].startswith("logit of the target: ")
    with pytest.raises(InputError, match="Prompt 3 does not exist"):
        found.top(prompt=3)
    assert found.table()["L1.mlp_out"].shape == (3,)


def test_one_prompt_of_several() -> None:
    found = attributed()
    one = found[1]
    assert len(one) == 1 and len(found[0:2]) == 2
    assert torch.equal(one.contributions[0], found.contributions[1])
    assert one.target_texts == (found.target_texts[1],)
    assert one.prompts is not None and one.prompts[0].targets == (31,)
    with pytest.raises(InputError, match="Prompt 7 does not exist"):
        found[7]


def test_a_prompt_without_a_foil_beside_one_with() -> None:
    model = held("llama")
    prompts = prompts_of(model)
    prompts[1] = Prompt(token_ids=prompts[1].token_ids, targets=(31, 32))
    found = logit_attribution(model, prompts)
    assert found.answer_ids.tolist() == [[30, -1, 60], [31, 32, -1], [32, -1, 62]]
    assert found.n_targets == 2 and found.default_of == "target"
    assert bool(found.contributions[1, 0, 2].isnan().all()) and not bool(found.contributions[1, 0, 1].isnan().any())
    assert bool(found.values("difference")[1].isnan().all())
    assert list(found.table("difference").left_out) == ["1"]
