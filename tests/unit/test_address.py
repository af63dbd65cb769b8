"""Address: every form reads as the same place, and prints as one form."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from murano.address import LENS_COMPONENTS, STREAM, WHOLE_MODEL, WRITTEN, Address, lens_address
from murano.errors import InputError

LAYER_COMPONENTS = (*STREAM, *WRITTEN)
ADDRESSES = st.one_of(
    st.builds(Address, st.integers(-200, 200), st.sampled_from(LAYER_COMPONENTS)),
    st.builds(Address, st.none(), st.sampled_from(WHOLE_MODEL)),
)


@given(ADDRESSES)
def test_it_parses_its_own_str(address: Address) -> None:
    assert Address.parse(str(address)) == address
    assert Address.parse(f"  {address} ") == address
    assert eval(repr(address), {"Address": Address.parse}) == address
    assert pickle.loads(pickle.dumps(address)) == copy.deepcopy(address) == address
    assert hash(Address.parse(str(address))) == hash(address)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, "L3.resid_post"),
        (-1, "L-1.resid_post"),
        (np.int64(2), "L2.resid_post"),
        (torch.tensor(4), "L4.resid_post"),
        ((3, "resid_post"), "L3.resid_post"),
        ([3, "resid_pre"], "L3.resid_pre"),
        ((None, "embeddings"), "embeddings"),
        ("L3", "L3.resid_post"),
        ("3", "L3.resid_post"),
        ("-1", "L-1.resid_post"),
        ("resid_post.3", "L3.resid_post"),
        ("resid_mid[3]", "L3.resid_mid"),
        ("block_output[3]", "L3.resid_post"),
        ("block_input.0", "L0.resid_pre"),
        ("L2.block_output", "L2.resid_post"),
        ("attention_output[1]", "L1.attn_out"),
        ("mlp_output[1]", "L1.mlp_out"),
        ("embed", "embeddings"),
        ("embedding", "embeddings"),
        ("final_norm", "ln_final"),
        ("lm_head", "lm_head"),
        (Address(5, "resid_pre"), "L5.resid_pre"),
    ],
)
def test_forms(value: Any, expected: str) -> None:
    assert str(Address.parse(value)) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("foo", "Unknown component 'foo'. Known: resid_pre, resid_mid"),
        ("L3.resid_pots", "Unknown component 'resid_pots'. Did you mean 'resid_post'?"),
        ("resid_post", "'resid_post' needs a layer: write 'L3.resid_post'"),
        ("L3.embeddings", "'embeddings' belongs to the whole model and takes no layer (got layer 3)"),
        ("", "'' is not a layer or an address. Write 3, -1, 'L3.resid_post'"),
        ("L3.resid_post.x", "is not a layer or an address"),
        ("L3 resid_post", "is not a layer or an address"),
        (3.0, "3.0 is not a layer or an address"),
        (True, "True is not a layer or an address"),
        (None, "None is not a layer or an address"),
        ((3, "resid_post", 1), "is not a layer or an address"),
        ((), "() is not a layer or an address"),
    ],
)
def test_what_is_no_address(value: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Address.parse(value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "value", [("foo", "resid_post"), (1.5, "resid_post"), (True, "resid_post"), ([], "resid_post")]
)
def test_a_pair_with_no_layer_in_it(value: Any) -> None:
    with pytest.raises(InputError, match="is not a layer or an address"):
        Address.parse(value)


def test_order_is_the_order_of_the_data() -> None:
    flow = ["embeddings", "L0.resid_pre", "L0.attn_out", "L0.resid_mid", "L0.mlp_out", "L0.resid_post", "L1.resid_pre"]
    flow += ["L1.resid_post", "L10.resid_pre", "ln_final", "lm_head", "logits"]
    addresses = [Address.parse(text) for text in flow]
    assert sorted(addresses[4:] + addresses[:4]) == addresses
    assert [str(a) for a in sorted(set(addresses))] == flow
    assert addresses[0] < addresses[1] <= addresses[1] < addresses[-1]
    assert addresses[-1] > addresses[0] >= addresses[0]
    with pytest.raises(TypeError):
        _ = addresses[0] < 3


@given(ADDRESSES, ADDRESSES)
def test_order_is_total_and_fits_equality(a: Address, b: Address) -> None:
    assert (a < b) + (a == b) + (a > b) == 1
    assert (a <= b) == (not a > b)


def test_resolve() -> None:
    assert [str(Address(i).resolve(4)) for i in (-4, -1, 0, 3)] == [f"L{i}.resid_post" for i in (0, 3, 0, 3)]
    assert Address(None, "embeddings").resolve(4) == Address(None, "embeddings")
    for layer in (4, -5, 99):
        with pytest.raises(
            InputError, match=f"Layer {layer} is outside the model, which has 4 layers: use 0 to 3, or -1"
        ):
            Address(layer).resolve(4)


@pytest.mark.parametrize("component", [*WRITTEN, "lm_head", "logits"])
def test_a_lens_is_put_on_the_stream_only(component: str) -> None:
    text = f"L1.{component}" if component in WRITTEN else component
    reason = "one summand of it" if component in WRITTEN else "already over the vocabulary"
    with pytest.raises(InputError) as caught:
        lens_address(text)
    assert f"A lens can't be put on '{text}'" in str(caught.value)
    assert reason in str(caught.value)
    assert "Allowed: embeddings, L<i>.resid_pre, L<i>.resid_mid, L<i>.resid_post, ln_final." in str(caught.value)


def test_what_a_lens_can_read() -> None:
    places = [lens_address(c if c in WHOLE_MODEL else f"L2.{c}") for c in LENS_COMPONENTS]
    assert all(place.on_stream for place in places)
    assert f"{places[0]:>12}" == "  embeddings"
