"""Vectors added to the stream, and what a model writes meanwhile; choosing a backend."""

from __future__ import annotations

import pytest
import torch
from support.reading import fresh, held, own_logits

from murano.errors import InputError, ModelError
from murano.lens import logit_lens
from murano.model import MuranoModel

PROMPT = "The capital of France is"
#: Tensors, tuples, parallel attention and MLP, more block calls than blocks.
FAMILIES = ["llama", "gpt2", "gpt_neox", "gemma2", "dory", "opt"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_vector_reaches_every_position_and_nothing_before_it(family: str) -> None:
    model = held(family)
    vector = torch.linspace(-1, 1, model.d_model)
    places = ["L0.resid_post", "L1.resid_post"]
    before = list(model.capture(PROMPT, places).values())
    with model.steered({"L1.resid_post": vector}):
        after = list(model.capture(PROMPT, places).values())
        steered = model.generate(PROMPT, max_new_tokens=3)
    assert torch.equal(after[0], before[0])
    torch.testing.assert_close(after[1], before[1] + vector)
    assert model.generate(PROMPT, max_new_tokens=3, add={1: vector}) == steered
    assert torch.equal(list(model.capture(PROMPT, places).values())[1], before[1]), "the vector stayed"


def test_the_last_layer_with_a_vector_is_what_the_head_makes_of_it() -> None:
    model = held("llama")
    last = f"L{model.n_layers - 1}.resid_post"
    (rows,) = model.capture(PROMPT, last).values()
    vector = torch.linspace(-1, 1, model.d_model)
    with model.steered({last: vector}):
        lens = logit_lens(model, PROMPT)
        (logits,) = model.capture(PROMPT, "logits").values()
    torch.testing.assert_close(model.decode(rows + vector), logits)
    assert lens.predicted_tokens[-1].tolist() == logits.argmax(-1).tolist()
    written = model.generate(PROMPT, max_new_tokens=1, add={last: vector})
    assert written.ids[0][0] == int(logits[0, -1].argmax())


def test_generate_takes_the_most_probable_token_each_time() -> None:
    model = fresh("llama")
    prompts = [PROMPT, "The city"]
    found = model.generate(prompts, max_new_tokens=5)
    for prompt, ids in zip(prompts, found.ids, strict=True):
        tokens = model.encode(prompt)
        for token in ids:
            assert token == int(own_logits(model.hf_model, torch.tensor([tokens]))[0, -1].argmax())
            tokens = [*tokens, token]
    assert found.texts == [model.tokenizer.decode(ids, skip_special_tokens=True) for ids in found.ids]
    model.hf_model.generation_config.eos_token_id = found.ids[0][1]
    first = found.ids[0].index(found.ids[0][1])
    assert model.generate(PROMPT, max_new_tokens=5).ids[0] == found.ids[0][: first + 1]


def test_decode_top_k_is_decode_without_the_vocabulary() -> None:
    model = held("gemma2")
    (rows,) = model.capture(PROMPT, "L1.resid_post").values()
    ids, probs = model.decode_top_k(rows, 3)
    expected = model.decode(rows).softmax(-1).topk(3)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(probs, expected.values)
    with pytest.raises(InputError, match="top_k=0"):
        model.decode_top_k(rows, 0)


@pytest.mark.parametrize(
    ("add", "said"),
    [
        ([1], "give a vector for each place"),
        ({"L1.resid_pre": torch.zeros(1)}, "What enters layer 1 is 'L0.resid_post'"),
        ({"logits": torch.zeros(1)}, "not at 'logits'"),
        ({"L99.resid_post": torch.zeros(1)}, "outside the model"),
        ({"L1.resid_post": torch.zeros(3)}, r"must be a tensor of shape \(\d+,\), not \(3,\)"),
        ({"L1.resid_post": [0.0]}, "not list"),
    ],
    ids=str,
)
def test_what_can_not_be_added(add: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        held("llama").generate(PROMPT, add=add)  # type: ignore[arg-type]


def test_one_place_named_twice_and_a_vector_that_is_not_finite() -> None:
    model = held("llama")
    with pytest.raises(InputError, match="named twice"):
        model.generate(PROMPT, add={1: torch.zeros(model.d_model), "L1": torch.zeros(model.d_model)})
    with pytest.raises(InputError, match="not finite"):
        model.generate(PROMPT, add={1: torch.full((model.d_model,), torch.nan)})
    for wrong in (0, True, 2.5):
        with pytest.raises(InputError, match="max_new_tokens"):
            model.generate(PROMPT, max_new_tokens=wrong)  # type: ignore[arg-type]


def test_backends_by_name() -> None:
    with pytest.raises(InputError, match="Did you mean 'vllm'"):
        MuranoModel("anything", backend="vlm")
    with pytest.raises(InputError, match="argument of vLLM's engine"):
        MuranoModel("anything", tensor_parallel_size=2)
    with pytest.raises(ModelError):
        MuranoModel("./nowhere", backend="eager")
    assert held("llama").backend == "eager"
