"""LensColumn: what each layer predicts at one position, as a table that reads well."""

from __future__ import annotations

import html
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from murano.address import Address


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LensColumn:
    """One position of one prompt through depth; printed, it is a table with a line per layer.

    Args:
        addresses: the layers.
        words: what each predicts.
        probs: how probable that is.
        answers: text, probability and rank through depth of each target and foil.
    """

    addresses: tuple[Address, ...]
    words: tuple[str, ...]
    probs: Float[Tensor, " layer"]
    answers: tuple[tuple[str, Float[Tensor, " layer"], Int[Tensor, " layer"]], ...] = ()

    def text(self, width: int = 30) -> str:
        """The table: address, prediction, probability, a bar; then each target's and foil's probability and rank.

        Args:
            width: length of the bar of a probability of 1.
        """
        heads = [f"p({text!r})" for text, _, _ in self.answers]
        aside = "".join(f"  {head:>12} {'rank':>6}" for head in heads)
        lines = [f"{'layer':>16}  {'prediction':<16} probability"]
        if aside:
            lines[0] = f"{lines[0]:<{44 + width}}{aside}"
        for layer, (address, word) in enumerate(zip(self.addresses, self.words, strict=True)):
            probability = float(self.probs[layer])
            bar = "#" * int(probability * width) if probability == probability else ""
            line = f"{address!s:>16}  {word!r:<16} {probability:5.3f}  {bar}"
            if aside:
                line = f"{line:<{44 + width}}"
                for head, (_, probs, ranks) in zip(heads, self.answers, strict=True):
                    line += f"  {float(probs[layer]):>{max(12, len(head))}.3f} {int(ranks[layer]):>6}"
            lines.append(line.rstrip())
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text())}</pre>"
