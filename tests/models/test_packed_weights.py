"""Weights stored as 8-bit integers are read by their own modules' arithmetic, never cast to the dtype they are stored in."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer
from torch import Tensor, nn

from murano import Address, MuranoModel
from murano.errors import UnsupportedModelError
from murano.lens import logit_lens

IDS = [20, 21, 22, 23, 24, 25]


class PackedLinear(nn.Module):
    """A Linear as weight-only quantisation keeps it: rows of int8 and a scale for each, multiplied out when it runs."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale.detach(), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


def packed(model_type: str, dtype: torch.dtype) -> nn.Module:
    model: nn.Module = tiny_model(model_type, dtype=dtype)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, PackedLinear(module))
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "opt", "gpt_neox"])
def test_packed_weights_are_read_as_they_run(model_type: str, dtype: torch.dtype) -> None:
    held = packed(model_type, dtype)
    model = MuranoModel(held, tokenizer=tiny_tokenizer())
    with torch.no_grad():
        own = held(torch.tensor([IDS])).logits
    last = Address(model.n_layers - 1)
    assert model.check_readout().exact
    assert torch.equal(model.decode(model.capture([IDS], last)[last]), own)
    probs = own[0].float().softmax(-1)
    lens = logit_lens(model, [IDS])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # of another shape, a bfloat16 product rounds otherwise
    torch.testing.assert_close(lens.max_probs[-1, 0], probs.amax(-1), atol=tolerance, rtol=0)
    assert held.get_submodule(model.anatomy.head or "").weight.dtype == torch.int8


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_activations_quantised_over_the_whole_batch_are_refused() -> None:
    """Dynamic int8 takes one scale for all tokens, so that a later token changes what is predicted before it."""
    held = torch.ao.quantization.quantize_dynamic(tiny_model("llama"), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(
        UnsupportedModelError, match=r"later tokens change its earlier predictions.*quantises activations"
    ):
        MuranoModel(held, tokenizer=tiny_tokenizer()).check_readout()
