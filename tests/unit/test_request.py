"""What to read, in all the forms in which it is written: on the command line and in Python alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from murano.errors import InputError
from murano.readout.ranges import split_ranges
from murano.readout.request import parse_layers, parse_positions


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("3", [3]),
        ("-1", [-1]),
        ("0,3,-1", [0, 3, -1]),
        ("0-5", [range(6)]),
        ("0:12:2", [range(0, 12, 2)]),
        (":4", [range(4)]),
        ("4:", [slice(4, None)]),
        ("-4:", [slice(-4, None)]),
        ("::2", [slice(None, None, 2)]),
        ("::-1", [slice(None, None, -1)]),
        ("embeddings, all", ["embeddings", "all"]),
        ("L3.resid_pre,resid_mid.2,block_output[1]", ["L3.resid_pre", "resid_mid.2", "block_output[1]"]),
    ],
)
def test_parts_of_a_string(text: str, parts: list[Any]) -> None:
    assert split_ranges(text) == parts


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ("0-2", "0 1 2"),
        ("embeddings,all", "embeddings 0 1 2 3"),
        ("embeddings, 2:", "embeddings 2 3"),
        ("::-1", "3 2 1 0"),
        (slice(1, 3), "1 2"),
        (slice(None, None, -2), "3 1"),
        (["embeddings", "0-1", -1], "embeddings 0 1 3"),
        ([slice(2), 3], "0 1 3"),
        (("embeddings", "all"), "embeddings 0 1 2 3"),
        (("embeddings", "0-1"), "embeddings 0 1"),
        ((0, "2-3"), "0 2 3"),
        ((2, "resid_post"), "2"),
        (np.int64(2), "2"),
        (np.array([1, 3]), "1 3"),
        (range(2), "0 1"),
        ("all", "0 1 2 3"),
        ("last", "3"),
        ("0,last", "0 3"),
    ],
)
def test_layers(layers: Any, named: str) -> None:
    assert " ".join(str(a).removeprefix("L").removesuffix(".resid_post") for a in parse_layers(layers, 4)) == named
    parse_layers(layers)  # nor is there anything wrong with it before the model is known


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ("foo", "'foo'. Known: resid_pre"),
        (
            "foo",
            "Layers may also be 'all', 'last', '0-5' (5 included), '0:12:2' (a slice), or several: 'embeddings,all'",
        ),
        ("", "'' is not a layer"),
        ("0,,1", "'' is not a layer"),
        ("5-2", "layers='5-2' is empty: write the smaller number first, '2-5'."),
        ("4:4", "layers='4:4' is empty"),
        ("0:4:0", "layers='0:4:0': the step of a slice can't be 0."),
        ("3!", "'3!' is not a layer or an address"),
        ("L3.attn_out", "L3.attn_out"),
        ("logits", "'logits'"),
        (["0-2", 1], "'L1.resid_post' is named twice in layers=['0-2', 1]."),
        (slice(None, None, 0), "slice step cannot be zero"),
        (slice("a"), "is no slice of layers"),
        (1.5, "nor a list of layers. Layers may also be 'all'"),
    ],
)
def test_layers_that_are_none(layers: Any, named: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_layers(layers)
    assert named in str(caught.value)


def test_a_layer_beyond_the_model_is_refused_where_it_was_named() -> None:
    for layers in ("0-4", "0:5", range(5), [0, 4]):
        with pytest.raises(InputError, match="Layer 4 is outside the model, which has 4 layers"):
            parse_layers(layers, 4)
    assert len(parse_layers(slice(0, 5), 4)) == 4  # Python's own slices are cut off


def test_positions() -> None:
    assert parse_positions("all") is None
    assert parse_positions("last") == (-1,)
    assert parse_positions("0, -1") == parse_positions([0, -1]) == (0, -1)
    assert parse_positions("3") == parse_positions(3) == (3,)
    assert parse_positions(range(2)) == (0, 1)
    assert parse_positions("0-2, -1") == (0, 1, 2, -1)
    for positions in ("first", "0,,1", "", "1.5"):
        with pytest.raises(
            InputError, match=f"positions='{positions}' is unknown. Use 'all', 'last', or token indices"
        ):
            parse_positions(positions)


@pytest.mark.parametrize(("positions", "named"), [([0, 0], 0), ((1, -1, 2, -1), -1), ("3,3", 3)])
def test_a_position_named_twice(positions: Any, named: int) -> None:
    with pytest.raises(InputError, match=f"Position {named} is named twice in positions="):
        parse_positions(positions)


@pytest.mark.parametrize("positions", ["-3:", "-3:-1", ":4", "0:2", "1:6:2", "-6:-1:3"])
def test_a_slice_of_positions_is_pythons_own(positions: str) -> None:
    start, stop, step = ([int(n) if n else None for n in positions.split(":")] + [None])[:3]
    for given in (positions, slice(start, stop, step), [slice(start, stop, step)]):
        found = parse_positions(given)
        assert found is not None
        for length in (6, 9):
            tokens = list(range(length))
            assert [tokens[p] for p in found] == tokens[start:stop:step]


@pytest.mark.parametrize(
    "positions", [":", "2:", "1:-1", "-1:2", "::2", ":-1", slice(None), slice(4, 0, -1), slice(3, None)]
)
def test_a_slice_that_differs_from_prompt_to_prompt(positions: Any) -> None:
    with pytest.raises(
        InputError, match=r"another number of positions in each prompt.*slice\(0, 3\) or slice\(-3, None\)"
    ):
        parse_positions(positions)
