"""Address: one place in a model, written ``L3.resid_post``.

The residual stream is named as the field names it: ``embeddings`` enters block 0, block *i* reads ``L<i>.resid_pre``
and leaves ``L<i>.resid_post``; ``L<i>.resid_mid`` lies between its attention and its MLP; ``ln_final`` is the stream
after the final norm. ``lm_head`` is the bare output of the unembedding, ``logits`` is what the model predicts from:
they differ where a family scales or soft-caps its logits.

What a block writes *into* the stream is named ``L<i>.attn_out`` and ``L<i>.mlp_out``, or ``L<i>.layer_out`` for all of it; a part of
that has a third name: ``L7.attn_out.h3`` is one head, ``L9.mlp_out.n102`` one neuron, ``L7.attn_out.rest`` what no head wrote. ``bias`` is
what the final norm and the unembedding add by themselves.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from murano.errors import InputError, nearest

#: Components of a block on the residual stream: what a logit lens can read.
STREAM = ("resid_pre", "resid_mid", "resid_post")
#: Places on the stream that belong to the whole model, in the order data meets them.
WHOLE_MODEL = ("embeddings", "ln_final", "lm_head", "logits")
#: What a block writes *into* the stream: summands, not the stream.
WRITTEN = ("attn_out", "mlp_out", "layer_out")
#: What the readout adds by itself, whatever the stream is.
BIAS = "bias"
#: Where a lens may be put.
LENS_COMPONENTS = ("embeddings", *STREAM, "ln_final")

_SYNONYMS = {
    "block_output": "resid_post",
    "block_input": "resid_pre",
    "embed": "embeddings",
    "embedding": "embeddings",
    "attention_output": "attn_out",
    "mlp_output": "mlp_out",
    "final_norm": "ln_final",
}
_PART = re.compile(r"[hn]\d+|rest")
_FORMS = (
    re.compile(r"L(?P<layer>-?\d+)\.(?P<component>\w+)(\.(?P<part>h\d+|n\d+|rest))?"),  # L3.resid_post, L7.attn_out.h3
    re.compile(r"(?P<component>[a-z_]\w*)\.(?P<layer>-?\d+)"),  # resid_post.3
    re.compile(r"(?P<component>[a-z_]\w*)\[(?P<layer>-?\d+)\]"),  # block_output[3]
    re.compile(r"L?(?P<layer>-?\d+)"),  # 3, L3
    re.compile(r"(?P<component>\w+)"),  # embeddings
)


@dataclass(frozen=True)
class Address:
    """One place in a model; hashable, and ordered as the data flows.

    Args:
        layer: index of the block, from 0; ``None`` for a place that belongs to the whole model. A negative index counts
            from the last block and is resolved against a model by :meth:`resolve`.
        component: ``resid_pre``, ``resid_mid``, ``resid_post``, ``attn_out``, ``mlp_out`` or ``layer_out`` of a block, or
            ``embeddings``, ``ln_final``, ``lm_head``, ``logits`` or ``bias`` of the model.
        part: of what a block writes: ``h3`` (a head), ``n102`` (a neuron), ``rest``; empty for all of it.

    Raises:
        InputError: the component is unknown, or it takes a layer and has none, or the other way round; or it has no such part.

    >>> Address.parse("resid_post.3")
    Address('L3.resid_post')
    >>> str(Address.parse(3)), str(Address.parse((3, "resid_pre"))), str(Address.parse("block_output[3]"))
    ('L3.resid_post', 'L3.resid_pre', 'L3.resid_post')
    """

    layer: int | None
    component: str = "resid_post"
    part: str = ""

    def __post_init__(self) -> None:
        component = _SYNONYMS.get(self.component, self.component)
        object.__setattr__(self, "component", component)
        if self.part and (component not in WRITTEN or not _PART.fullmatch(self.part)):
            raise InputError(
                f"{component!r} has no part {self.part!r}. Parts are those of what a block writes: 'L7.attn_out.h3' (a head), "
                "'L9.mlp_out.n102' (a neuron), 'L7.attn_out.rest'."
            )
        if component in (*WHOLE_MODEL, BIAS):
            if self.layer is not None:
                raise InputError(
                    f"{component!r} belongs to the whole model and takes no layer (got layer {self.layer})."
                )
        elif component in STREAM or component in WRITTEN:
            if self.layer is None:
                raise InputError(f"{component!r} needs a layer: write 'L3.{component}'.")
        else:
            known = (*STREAM, *WRITTEN, *WHOLE_MODEL, BIAS)
            raise InputError(
                f"Unknown component {component!r}.{nearest(component, (*known, *_SYNONYMS))} Known: {', '.join(known)}."
            )

    @classmethod
    def parse(cls, value: Any) -> Address:
        """Read an address from any of its forms.

        Args:
            value: an ``Address``, ``3``, ``(3, "resid_post")``, ``"L3.resid_post"``, ``"L3"``, ``"resid_post.3"``,
                ``"block_output[3]"`` or ``"embeddings"``.

        Raises:
            InputError: the value has none of these forms.
        """
        if isinstance(value, Address):
            return value
        if isinstance(value, bool):
            raise InputError(_not_an_address(value))
        if hasattr(value, "__index__"):  # ints, numpy ints, 0-d integer tensors
            return cls(value.__index__())
        if isinstance(value, str):
            for form in _FORMS:
                if match := form.fullmatch(value.strip()):
                    found = match.groupdict()
                    layer = found.get("layer")
                    component = found.get("component") or "resid_post"
                    return cls(None if layer is None else int(layer), component, found.get("part") or "")
            raise InputError(_not_an_address(value))
        if isinstance(value, Sequence) and len(value) == 2 and isinstance(value[1], str):
            layer = value[0]
            if layer is None or (hasattr(layer, "__index__") and not isinstance(layer, bool)):
                return cls(None if layer is None else layer.__index__(), value[1])
        raise InputError(_not_an_address(value))

    def resolve(self, n_layers: int) -> Address:
        """The same address with a layer counted from 0.

        Args:
            n_layers: how many blocks the model has.

        Raises:
            InputError: the layer lies outside the model.
        """
        if self.layer is None:
            return self
        if not -n_layers <= self.layer < n_layers:
            raise InputError(
                f"Layer {self.layer} is outside the model, which has {n_layers} layers: "
                f"use 0 to {n_layers - 1}, or -1 for the last."
            )
        return Address(self.layer % n_layers, self.component, self.part)

    @property
    def on_stream(self) -> bool:
        """Whether this place is the residual stream itself, so that a lens may read it."""
        return self.component in LENS_COMPONENTS

    @property
    def _rank(self) -> tuple[int, int, int, str, int]:
        if self.layer is None:
            place = (*WHOLE_MODEL, BIAS).index(self.component)
            return (-1 if self.component == "embeddings" else 1, 0, place, "", 0)
        order = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "layer_out", "resid_post")
        kind, number = self.part[:1], self.part[1:]
        return (0, self.layer, order.index(self.component), kind, int(number) if number.isdigit() else 0)

    def __lt__(self, other: object) -> bool:
        return self._rank < other._rank if isinstance(other, Address) else NotImplemented

    def __le__(self, other: object) -> bool:
        return self._rank <= other._rank if isinstance(other, Address) else NotImplemented

    def __gt__(self, other: object) -> bool:
        return self._rank > other._rank if isinstance(other, Address) else NotImplemented

    def __ge__(self, other: object) -> bool:
        return self._rank >= other._rank if isinstance(other, Address) else NotImplemented

    def __str__(self) -> str:
        place = self.component if self.layer is None else f"L{self.layer}.{self.component}"
        return f"{place}.{self.part}" if self.part else place

    def __repr__(self) -> str:
        return f"Address({str(self)!r})"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def _not_an_address(value: object) -> str:
    return (
        f"{value!r} is not a layer or an address. Write 3, -1, 'L3.resid_post', (3, 'resid_post'), "
        "'resid_post.3', 'block_output[3]' or 'embeddings'."
    )


def is_one(value: Any) -> bool:
    """Whether a value is meant as one address: ``(3, "resid_pre")`` is, ``(3, "embeddings")`` and ``[3]`` are several."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
        of_a_layer = _SYNONYMS.get(value[1], value[1]) in (*STREAM, *WRITTEN)
        return value[0] is None or (of_a_layer and not isinstance(value[0], str))
    try:
        operator.index(value)
    except TypeError:  # having __index__ says nothing: arrays have it, too
        return isinstance(value, (str, Address))
    return True


def lens_address(value: Any) -> Address:
    """Parse an address that a logit lens is to read, and refuse what is not the residual stream.

    Raises:
        InputError: not an address, or a place that is not on the residual stream.
    """
    address = Address.parse(value)
    if not address.on_stream:
        reason = (
            "it is what a block writes into the residual stream, one summand of it: projecting it would project a difference"
            if address.component in WRITTEN
            else "it is what the readout adds to every logit"
            if address.component == BIAS
            else "it is already over the vocabulary"
        )
        raise InputError(
            f"A lens can't be put on '{address}': {reason}. "
            f"Allowed: {', '.join(c if c in WHOLE_MODEL else f'L<i>.{c}' for c in LENS_COMPONENTS)}."
        )
    return address
