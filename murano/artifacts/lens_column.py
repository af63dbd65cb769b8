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
        targets: the accepted answers, where there are any.
        target_probs: the probability of each.
        target_ranks: how many tokens are more probable than each.
    """

    addresses: tuple[Address, ...]
    words: tuple[str, ...]
    probs: Float[Tensor, " layer"]
    targets: tuple[str, ...] = ()
    target_probs: Float[Tensor, "layer target"] | None = None
    target_ranks: Int[Tensor, "layer target"] | None = None

    def text(self, width: int = 30) -> str:
        """The table: address, prediction, probability, a bar; then each target's probability and rank.

        Args:
            width: length of the bar of a probability of 1.
        """
        aside = [f"  {f'p({target!r})':>12} {'rank':>6}" for target in self.targets]
        bars = f"{'':<{width}}" if aside else ""
        lines = [f"{'layer':>16}  {'prediction':<16} probability{bars}{''.join(aside)}".rstrip()]
        for layer, (address, word) in enumerate(zip(self.addresses, self.words, strict=True)):
            probability = float(self.probs[layer])
            bar = "#" * int(probability * width) if probability == probability else ""
            line = f"{address!s:>16}  {word!r:<16} {probability:5.3f}  {bar}"
            for target, said in enumerate(self.targets):
                assert self.target_probs is not None and self.target_ranks is not None
                room = max(12, len(f"p({said!r})"))
                line = f"{line:<{47 + width}}" if target == 0 else line
                line += (
                    f"  {float(self.target_probs[layer, target]):>{room}.3f} {int(self.target_ranks[layer, target]):>6}"
                )
            lines.append(line.rstrip())
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text())}</pre>"
