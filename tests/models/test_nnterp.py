"""Going deeper: nnterp's names on the very module that Murano reads, whether or not nnterp knows the family."""

from __future__ import annotations

import pytest
import torch
from support.reading import fresh, ids_of, own_stream
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from murano.errors import UnsupportedModelError
from murano.model import MuranoModel

FAMILIES = ["gpt2", "llama", "gpt_neox", "mamba", "biogpt", "xglm", "opt", "cohere"]


@pytest.mark.parametrize("family", FAMILIES)
def test_trace_reads_the_same_numbers(family: str, capfd: pytest.CaptureFixture[str]) -> None:
    model = fresh(family)
    ids = ids_of(model, batch=1)
    names = [block.name for block in model.anatomy.blocks]
    stream, logits = own_stream(model.hf_model, ids, names)
    capfd.readouterr()
    with model.trace(ids):
        first = model.layers[0].output.save()
        last = model.layers[-1].output.save()
        normed = model.ln_final.output.save()
        head = model.lm_head.output.save()
    for mine, theirs in ((first, stream[0]), (last, stream[-1])):
        mine = mine[0] if isinstance(mine, tuple) else mine
        assert torch.equal(mine.reshape(theirs.shape), theirs)
    assert torch.equal(head.reshape(logits.shape) * (0.37 if family == "cohere" else 1), logits)
    assert normed.shape[-1] == model.d_model
    assert len(model.layers) == model.n_layers
    out, err = capfd.readouterr()
    assert out == ""
    assert "nnterp" not in err


def test_it_is_the_same_module() -> None:
    model = fresh("llama")
    assert model.nnterp._model is model.hf_model
    assert model.nnterp is model.nnterp
    pointers = {p.data_ptr() for p in model.hf_model.parameters()}
    assert {p.data_ptr() for p in model.nnterp._model.parameters()} == pointers
    assert MuranoModel(model.nnterp, tokenizer=model.tokenizer).hf_model is model.hf_model


def test_the_lens_is_the_same_after_tracing() -> None:
    from murano.lens import logit_lens

    model = fresh("gpt2")
    before = logit_lens(model, [[20, 21, 22]])
    with model.trace(torch.tensor([[20, 21, 22]])):
        model.layers[1].output.save()
    after = logit_lens(model, [[20, 21, 22]])
    assert torch.equal(before.top_probs, after.top_probs)


def test_a_family_that_nnterp_cannot_name_alone() -> None:
    from nnterp import StandardizedTransformer

    module = tiny_model("biogpt")
    with pytest.raises(Exception, match=r"(?i)rename|layers|norm|attribute|lm_head"):
        StandardizedTransformer(module, tokenizer=tiny_tokenizer())
    model = MuranoModel(tiny_model("biogpt"), tokenizer=tiny_tokenizer())
    assert model.check_readout().exact
    with model.trace(torch.tensor([[20, 21, 22]])):
        out = model.lm_head.output.save()
    with torch.no_grad():
        assert torch.equal(out, model.hf_model(torch.tensor([[20, 21, 22]])).logits)


def test_what_nnterp_cannot_wrap_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import nnterp

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no such architecture")

    monkeypatch.setattr(nnterp, "StandardizedTransformer", refuse)
    model = fresh("llama")
    with pytest.raises(
        UnsupportedModelError, match=r"nnterp can't wrap LlamaForCausalLM \(ValueError: no such architecture\)"
    ):
        model.trace("x")
    assert model.decode(torch.zeros(32)).shape == (256,)
