"""Every causal language model that transformers maps is read to the bit, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import tiny_models
from support.reading import block_names, held, ids_of, logits_with_injected, own_logits, own_stream
from support.tiny_models import causal_lm_types, tiny_config, tiny_model
from support.tiny_tokenizer import tiny_tokenizer
from transformers import AutoModelForCausalLM

from murano.errors import UnsupportedModelError
from murano.lens import logit_lens
from murano.model import MuranoModel
from murano.model.tail import Replay

# Family → what the refusal must say, in float32.
REFUSED = {
    "cpmant": "no stack of blocks that return the residual stream",
    "gemma4_assistant": "can't run on token ids alone",
    "gemma4_unified_assistant": "can't run on token ids alone",
    "inkling2_loop_text": "do not follow from the output of its last block",
    "inkling2_text": "do not follow from the output of its last block",
    "prophetnet": "no stack of blocks that return the residual stream",
    "reformer": "do not follow from the output of its last block",
    "xlm": "do not follow from the output of its last block",
    "xlnet": "is not causal",
}
# Those two have kernels that torch does not have in bfloat16: the model itself can't run.
REFUSED_IN_BF16 = REFUSED | dict.fromkeys(("reformer", "xlnet"), "can't run on token ids alone")
REPLAYED = {"big_bird", "deepseek_v4", "gemma3n", "gemma3n_text", "hy_v4"}
# They add up their blocks in float32 whatever the weights are.
RESIDUAL_IN_FP32 = {"falcon_mamba", "mamba", "mamba2", "zaya"}
READ = [family for family in causal_lm_types() if family not in REFUSED]


def test_how_many_families_are_read() -> None:
    """The families that are not refused are tested one by one below, each to the bit."""
    assert len(READ) == len(causal_lm_types()) - len(REFUSED)
    assert len(READ) >= 186


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted(REFUSED))
def test_refused_by_name(family: str, dtype: torch.dtype) -> None:
    module = tiny_model(family, dtype=dtype)
    model = MuranoModel(module, tokenizer=tiny_tokenizer())
    with pytest.raises(UnsupportedModelError) as caught:
        logit_lens(model, [[20, 21, 22]])
    assert type(module).__name__ in str(caught.value)
    assert (REFUSED if dtype == torch.float32 else REFUSED_IN_BF16)[family] in str(caught.value)


@pytest.mark.parametrize("family", READ)
def test_last_layer_is_the_models_own_prediction(family: str) -> None:
    model = held(family)
    module, blocks = model.hf_model, block_names(model)
    a, b = ids_of(model, seed=10), ids_of(model, seed=11)
    stream, logits = own_stream(module, b, blocks)
    last = stream[-1]
    assert not torch.equal(own_logits(module, a), logits)

    # The tail, at the same shape, and what the proof says of it.
    proof = model.check_readout()
    assert torch.equal(model.tail(last), logits)
    assert (proof.exact, proof.max_difference) == (True, 0.0)
    assert proof.path == ("replay" if family in REPLAYED else "short")
    assert proof.n_layers == len(blocks) == model.n_layers

    # The cross test: A's tokens run, B's residual is injected; by a plain hook, and by the replay.
    assert torch.equal(logits_with_injected(module, a, blocks, last), logits)
    assert torch.equal(Replay(model.anatomy)(last, a), logits)

    # The same through the public door, with every layer beside an independent hook.
    names = [f"L{i}.resid_post" for i in range(model.n_layers)]
    captured = model.capture(b.tolist(), names)
    assert [str(address) for address in captured] == names
    for mine, theirs in zip(captured.values(), stream, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(model.decode(list(captured.values())[-1]), logits)

    # And what a user sees of it.
    lens = logit_lens(model, b.tolist(), layers=-1)
    expected = logits.softmax(-1)
    assert (lens.top_probs[0] - expected.gather(-1, lens.top_ids[0].long())).abs().max() < 1e-5
    assert (lens.top_probs[0] - expected.topk(5).values).abs().max() < 1e-5
    assert (lens.log_normalizer[0] - logits.logsumexp(-1)).abs().max() < 1e-4
    assert lens.readout["exact"] is True


@pytest.mark.parametrize("family", READ)
def test_last_layer_in_bfloat16(family: str) -> None:
    """Within one bf16 ulp of each logit, at the same shape."""
    model = held(family, torch.bfloat16)
    ids = ids_of(model, seed=11)
    stream, logits = own_stream(model.hf_model, ids, block_names(model))
    captured = model.capture(ids.tolist(), -1)
    (mine,) = captured.values()
    assert mine.dtype == (torch.float32 if family in RESIDUAL_IN_FP32 else torch.bfloat16)
    assert torch.equal(mine, stream[-1])
    decoded = model.decode(mine)
    assert decoded.dtype == logits.dtype
    ulp = logits.float().abs().clamp(min=2.0**-126) * 2.0**-7
    assert bool(((decoded.float() - logits.float()).abs() <= ulp).all())
    assert model.check_readout().max_difference <= 2.0**-7 * model.check_readout().scale
    lens = logit_lens(model, ids.tolist(), layers=-1)
    assert lens.top_probs.dtype == torch.float32
    expected = logits.float().softmax(-1)
    assert (lens.top_probs[0] - expected.gather(-1, lens.top_ids[0].long())).abs().max() < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["bert", "big_bird", "electra", "roberta", "roformer", "xmod"])
def test_an_encoder_is_refused_in_any_precision(family: str, dtype: torch.dtype) -> None:
    """transformers maps these with is_decoder=False as well; then they see the tokens that they are to predict."""
    config = tiny_config(family)
    config.is_decoder = False  # type: ignore[attr-defined]
    module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    tiny_models._randomise(module, 0)
    with pytest.raises(UnsupportedModelError, match=r"is not causal.*is_decoder=True"):
        MuranoModel(module, tokenizer=tiny_tokenizer()).check_readout()


def _wrap(**changes: Any) -> Any:
    from transformers import GPT2LMHeadModel

    class Changed(GPT2LMHeadModel):  # type: ignore[misc]
        pass

    for name, change in changes.items():
        setattr(Changed, name, change)
    module = tiny_model("gpt2")
    module.__class__ = Changed
    return module


def _codebooks(self: Any, input_ids: torch.Tensor, **_: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutput

    hidden = self.transformer(input_ids).last_hidden_state
    return CausalLMOutput(logits=torch.stack([self.lm_head(hidden)] * 4, dim=1))


def _two_streams(self: Any, input_ids: torch.Tensor, **_: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutput

    out = self.transformer(input_ids, output_hidden_states=True)
    return CausalLMOutput(logits=self.lm_head(out.last_hidden_state + out.hidden_states[1]))


def _no_logits(self: Any, input_ids: torch.Tensor, **_: Any) -> Any:
    return self.transformer(input_ids)


def _no_stack(self: Any, input_ids: torch.Tensor, **_: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(logits=self.lm_head(self.transformer.wte(input_ids)))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (_codebooks, r"Changed returns logits of shape \(3, 4, 7, 256\).*codebooks"),
        (_two_streams, "Changed can't be read by a lens: its logits do not follow from the output of its last block"),
        (_no_stack, "Changed has no stack of blocks"),
    ],
    ids=["codebooks", "two streams", "none"],
)
def test_a_model_that_is_no_single_stream_is_refused(forward: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        MuranoModel(_wrap(forward=forward), tokenizer=tiny_tokenizer()).check_readout()


def test_a_model_without_a_head_is_refused() -> None:
    from transformers import BertModel, GPT2Model

    for module in (GPT2Model(tiny_config("gpt2")), BertModel(tiny_config("bert"))):  # type: ignore[arg-type]
        with pytest.raises(UnsupportedModelError, match=f"{type(module).__name__} returns no"):
            MuranoModel(module.eval(), tokenizer=tiny_tokenizer()).check_readout()


def test_a_tail_that_adds_an_earlier_block_is_never_exact_by_luck() -> None:
    """The proof is made with two prompts: the short path of two streams reproduces neither."""
    module = _wrap(forward=_two_streams)
    with pytest.raises(UnsupportedModelError, match="off by"):
        MuranoModel(module, tokenizer=tiny_tokenizer()).check_readout()


def test_the_proof_says_what_was_done() -> None:
    proof = held("gemma2").check_readout()
    assert proof.path == "short"
    assert proof.steps == "model.norm → lm_head → div(x, 2.0) → tanh(x) → mul(x, 2.0)"
    assert (proof.model_class, proof.dtype, proof.n_layers) == ("Gemma2ForCausalLM", "float32", 3)
    assert [len(prompts) for prompts in proof.prompts] == [3, 3]
    assert proof.prompts[0] != proof.prompts[1]
    assert 0 < proof.scale <= 2.0  # capped
    assert "equal to the bit" in str(proof)
    assert proof.to_dict()["steps"] == proof.steps
    replayed = held("gemma3n_text").check_readout()
    assert replayed.path == "replay"
    assert "not one vector per position" in replayed.reason


def test_proving_makes_no_copy_of_the_weights() -> None:
    module = tiny_model("llama")
    before = {name: p.data_ptr() for name, p in module.named_parameters()}
    model = MuranoModel(module, tokenizer=tiny_tokenizer())
    assert model.check_readout().exact
    assert {name: p.data_ptr() for name, p in model.hf_model.named_parameters()} == before
    assert model.hf_model is module
