"""decode: any residuals to logits by the model's own modules, with a gradient where it is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.reading import block_names, forwards, fresh, held, ids_of, own_logits, own_stream
from support.tiny_models import HIDDEN_SIZE, VOCAB_SIZE, tiny_config, tiny_model
from support.tiny_tokenizer import tiny_tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from murano.errors import InputError, ReadoutError, UnsupportedModelError
from murano.lens import logit_lens, reread
from murano.model import MuranoModel

SHORT, REPLAYED = ("llama", "gemma2", "opt", "minicpm3"), ("gemma3n_text", "deepseek_v4")


def last_residual(model: MuranoModel, seed: int = 0) -> tuple[Tensor, Tensor]:
    stream, logits = own_stream(model.hf_model, ids_of(model, seed=seed), block_names(model))
    return stream[-1], logits


@pytest.mark.parametrize("family", [*SHORT, *REPLAYED])
@pytest.mark.parametrize("shape", [(), (4,), (3, 7), (2, 3, 7)], ids=["d", "n d", "b t d", "l b t d"])
def test_any_shape(family: str, shape: tuple[int, ...]) -> None:
    model = held(family)
    last, logits = last_residual(model)
    n = torch.Size(shape).numel()
    which = torch.arange(n) % (last.shape[0] * last.shape[1])
    rows = last.flatten(0, 1)[which].reshape(*shape, model.d_model)
    decoded = model.decode(rows)
    assert decoded.shape == (*shape, model.vocab_size)
    assert (decoded - logits.flatten(0, 1)[which].reshape(decoded.shape)).abs().max() < 2e-5
    assert not decoded.requires_grad
    if shape == (3, 7):
        assert torch.equal(decoded, logits)


def test_no_rows_give_no_logits() -> None:
    assert held("llama").decode(torch.zeros(0, HIDDEN_SIZE)).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("family", "arithmetic"),
    [
        ("gemma2", lambda x: torch.tanh(x / 2.0) * 2.0),
        ("cohere", lambda x: x * 0.37),
        ("granite", lambda x: x / 1.9),
        ("minicpm3", lambda x: x),  # divides before the unembedding
        ("inkling_text", lambda x: x[..., :250]),
        ("llama", lambda x: x),
    ],
)
def test_raw_is_what_the_unembedding_gives(family: str, arithmetic: Any) -> None:
    model = held(family)
    seen: list[Tensor] = []
    assert model.check_readout().path == "short"
    handle = model.hf_model.get_submodule("lm_head").register_forward_hook(lambda _m, _a, output: seen.append(output))
    last, logits = last_residual(model)
    handle.remove()
    raw = model.decode(last, raw=True)
    assert torch.equal(raw, seen[0])
    assert torch.equal(arithmetic(raw), logits)
    assert torch.equal(model.decode(last), logits)
    assert torch.equal(raw[..., :250], logits[..., :250]) == (family in ("minicpm3", "llama", "inkling_text"))


@pytest.mark.parametrize("family", [*REPLAYED, "gemma3n", "hy_v4"])
def test_raw_is_refused_where_there_is_no_such_thing(family: str) -> None:
    model = held(family)
    rows = torch.zeros(2, model.d_model)
    with forwards(model.hf_model) as ran:
        assert model.check_readout().path == "replay"
        ran[0] = 0
        with pytest.raises(
            InputError, match=r"has no bare unembedding to read \(raw=True\): the stream is not one vector"
        ):
            model.decode(rows, raw=True)
        assert ran[0] == 0


@pytest.mark.parametrize(
    ("family", "step", "tolerance"),
    [
        ("gpt2", 1e-6, 1e-6),
        ("opt", 1e-6, 1e-6),
        ("rwkv", 1e-6, 1e-6),
        ("bert", 1e-6, 1e-6),
        ("big_bird", 1e-6, 1e-6),  # replayed
        # The norms of these compute in float32 even in a float64 model: a finite difference needs a longer step.
        ("llama", 2e-3, 1e-3),
        ("gemma2", 2e-3, 1e-3),
        ("gemma3n_text", 2e-3, 1e-3),  # replayed
    ],
)
def test_gradient_against_finite_differences(family: str, step: float, tolerance: float) -> None:
    """The model is not frozen by its owner, and still nothing but the residual receives a gradient."""
    model = fresh(family, torch.float64)
    last, _ = last_residual(model)
    assert all(p.requires_grad for p in model.hf_model.parameters())
    row = last[0, -1].clone().requires_grad_()

    def objective(x: Tensor) -> Tensor:
        logits = model.decode(x, detach=False)
        return logits[40] - 0.5 * logits[77] + 0.1 * logits.logsumexp(-1)

    objective(row).backward()
    assert row.grad is not None
    with torch.no_grad():
        for axis in range(0, model.d_model, 5):
            bump = torch.zeros_like(row)
            bump[axis] = step
            numeric = (objective(row + bump) - objective(row - bump)) / (2 * step)
            assert abs(float(numeric - row.grad[axis])) < tolerance * max(1.0, float(row.grad.abs().max())), axis
    assert row.grad.abs().max() > 1e-3
    assert all(p.grad is None for p in model.hf_model.parameters())
    assert all(p.requires_grad for p in model.hf_model.parameters())  # left as its owner had it


@pytest.mark.parametrize("family", ["llama", "gemma3n_text"])
def test_a_residual_can_be_optimised(family: str) -> None:
    model = fresh(family)
    before = {name: value.clone() for name, value in model.hf_model.state_dict().items()}
    last, _ = last_residual(model)
    row = last[0, -1].clone().requires_grad_()
    start = float(model.decode(row).softmax(-1)[33])
    optimizer = torch.optim.Adam([row], lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        (-model.decode(row, detach=False).log_softmax(-1)[33]).backward()
        optimizer.step()
    end = float(model.decode(row).softmax(-1)[33])
    assert end > 2 * start
    assert all(torch.equal(before[name], value) for name, value in model.hf_model.state_dict().items())


def test_detach_gives_no_graph() -> None:
    model = held("llama")
    row = torch.randn(HIDDEN_SIZE, requires_grad=True)
    assert model.decode(row).grad_fn is None
    assert model.decode(row, detach=False).requires_grad
    with torch.no_grad():
        assert not model.decode(row, detach=False).requires_grad


@pytest.mark.parametrize(
    ("residuals", "shown"),
    [
        (torch.zeros(3, HIDDEN_SIZE + 1), r"\(3, 33\)"),
        (torch.zeros(HIDDEN_SIZE, 4), r"\(32, 4\)"),
        (torch.tensor(1.0), r"\(\)"),
        ([[0.0] * HIDDEN_SIZE], "list"),
    ],
)
def test_a_wrong_width_is_refused(residuals: Any, shown: str) -> None:
    with pytest.raises(InputError, match=f"last axis is d_model = 32, not {shown}"):
        held("llama").decode(residuals)


def test_a_model_in_training_mode_is_read_at_rest_and_left_as_it_was() -> None:
    config = tiny_config("gpt2")
    assert config.resid_pdrop > 0  # type: ignore[attr-defined]
    module = tiny_model("gpt2")
    module.train()
    module.transformer.h[1].eval()  # a mixture of flags, as when some layers are frozen
    flags = {name: part.training for name, part in module.named_modules()}
    model = MuranoModel(module, tokenizer=tiny_tokenizer())
    quiet = held("gpt2")
    ids = ids_of(quiet)
    expected = logit_lens(quiet, ids.tolist())
    lens = logit_lens(model, ids.tolist())
    assert torch.equal(lens.top_ids, expected.top_ids)
    assert torch.equal(lens.top_probs, expected.top_probs)
    stream = model.capture(ids.tolist(), ["L0", "L2"])
    for address, rows in quiet.capture(ids.tolist(), ["L0", "L2"]).items():
        assert torch.equal(stream[address], rows)
        assert torch.equal(model.decode(stream[address]), quiet.decode(rows))
    assert {name: part.training for name, part in module.named_modules()} == flags
    with torch.no_grad():
        assert not torch.equal(module(ids).logits, module(ids).logits)  # dropout is really on


def test_training_flags_are_put_back_after_an_error() -> None:
    module = tiny_model("gpt2").train()
    model = MuranoModel(module, tokenizer=tiny_tokenizer())
    assert model.check_readout().exact

    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    handle = module.transformer.h[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        logit_lens(model, [[20, 21]])
    handle.remove()
    assert all(part.training for part in module.modules())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_model_changed_after_loading_is_noticed(family: str) -> None:
    model = fresh(family)
    assert logit_lens(model, [[20, 21, 22]]).n_prompts == 1
    other = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False)
    model.hf_model.lm_head = other
    with pytest.raises(
        ReadoutError, match=r"at L2\.resid_post, last position of prompt 0, a logit differs by \d.*new MuranoModel"
    ):
        logit_lens(model, [[20, 21, 22]], layers=[0])
    again = MuranoModel(model.hf_model, tokenizer=tiny_tokenizer())
    assert again.check_readout().exact
    assert logit_lens(again, [[20, 21, 22]]).n_prompts == 1


def test_logits_scaled_after_loading_are_noticed_in_bfloat16_too() -> None:
    model = fresh("llama", torch.bfloat16)
    assert model.check_readout().exact

    def scale(_module: nn.Module, _args: Any, output: Any) -> Any:
        output.logits = output.logits * 1.2
        return output

    model.hf_model.register_forward_hook(scale)
    with pytest.raises(ReadoutError, match="a logit differs by"):
        logit_lens(model, [[20, 21, 22], [30, 31]])


def test_weights_edited_in_place_are_read_as_they_are() -> None:
    model = fresh("llama")
    assert model.check_readout().exact
    with torch.no_grad():
        model.hf_model.lm_head.weight.mul_(3.0)
    ids = ids_of(model)
    lens = logit_lens(model, ids.tolist(), layers=-1)
    expected = own_logits(model.hf_model, ids).softmax(-1)
    assert (lens.top_probs[0] - expected.topk(5).values).abs().max() < 1e-5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_where_residuals_stop_being_finite(bad: float) -> None:
    model = fresh("llama")
    assert model.check_readout().exact
    with torch.no_grad():
        model.hf_model.model.layers[1].mlp.down_proj.weight[0, 0] = bad
    with pytest.warns(UserWarning, match=r"not finite from L1\.resid_post on \(\d+ of 5 rows there\)"):
        lens = logit_lens(model, [[20, 21, 22], [30, 31]])
    assert len(lens.notes) == 1
    assert "not finite from L1.resid_post on" in lens.notes[0]
    assert lens.entropy[0][lens.attention_mask].isfinite().all()
    assert not lens.entropy[2][lens.attention_mask].isfinite().any()


def test_where_residuals_are_zero() -> None:
    model = fresh("llama")
    with torch.no_grad():
        model.hf_model.model.embed_tokens.weight[25] = 0.0
    with pytest.warns(UserWarning, match=r"all zero from embeddings on \(1 of 2 rows there\)"):
        lens = logit_lens(model, [[25, 21]], layers=["embeddings", "all"])
    assert [note.partition(" on ")[0] for note in lens.notes] == ["Residuals are all zero from embeddings"]


def test_a_model_that_predicts_nan_from_the_start_is_refused_with_the_layer() -> None:
    module = tiny_model("llama")
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(
        UnsupportedModelError, match=r"LlamaForCausalLM predicts NaN: not finite from L1\.resid_post on, in float32"
    ):
        MuranoModel(module, tokenizer=tiny_tokenizer()).check_readout()


def test_kept_residuals_decode_to_what_was_read() -> None:
    """Also where the stream is float32 in a model of bfloat16 weights."""
    for family, dtype in (("llama", torch.float32), ("llama", torch.bfloat16), ("mamba", torch.bfloat16)):
        model = fresh(family, dtype)
        ids = ids_of(model)
        lens = logit_lens(model, ids.tolist(), keep="residuals")
        captured = model.capture(ids.tolist(), range(model.n_layers))
        assert lens.residuals is not None
        for mine, theirs in zip(lens.residuals, captured.values(), strict=True):
            assert torch.equal(mine, theirs)
        assert torch.equal(lens.decode(model)[-1], own_logits(model.hf_model, ids))


def test_a_tied_head_stays_tied() -> None:
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    module = AutoModelForCausalLM.from_config(config).eval()
    model = MuranoModel(module, tokenizer=tiny_tokenizer())
    assert model.check_readout().exact
    assert model.hf_model.lm_head.weight.data_ptr() == model.hf_model.model.embed_tokens.weight.data_ptr()


def test_another_models_residuals_are_not_reread() -> None:
    lens = logit_lens(fresh("llama"), "hello", keep="residuals")
    other = MuranoModel(tiny_model("llama", seed=5), tokenizer=tiny_tokenizer())
    with pytest.raises(InputError, match="is not the model that was read, LlamaForCausalLM: its weights differ"):
        reread(lens, other)
    assert torch.equal(reread(lens, fresh("llama")).top_ids, lens.top_ids)
