"""Token ids as text, built only for the cells that somebody reads, once per distinct id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from jaxtyping import Int
from torch import Tensor

#: The id of a cell that holds no token: padding of a shorter prompt.
NO_TOKEN = -1


class TokenWords(Mapping[int, str]):
    """The text of token ids: what a tokenizer says, remembered, so that it outlives the tokenizer.

    Args:
        known: texts that are known already, as read from a file.
        decode: gives the text of an id that is not known yet; without it an unknown id reads ``⟨id⟩``.
    """

    def __init__(self, known: Mapping[int, str] | None = None, decode: Callable[[int], str] | None = None) -> None:
        self._known: dict[int, str] = {NO_TOKEN: "", **(known or {})}
        self._decode = decode

    def __getitem__(self, token_id: int) -> str:
        word = self._known.get(token_id)
        if word is None:
            word = self._decode(token_id) if self._decode is not None else f"⟨{token_id}⟩"
            self._known[token_id] = word
        return word

    def __iter__(self) -> Iterator[int]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def of(self, *ids: Int[Tensor, "..."]) -> dict[int, str]:
        """The text of every distinct id in these tensors, padding left out: what an artifact saves."""
        distinct = sorted({int(i) for tensor in ids for i in torch.unique(tensor).tolist()} - {NO_TOKEN})
        return {token_id: self[token_id] for token_id in distinct}


class WordGrid(Sequence[Any]):
    """Ids as nested lists of words: ``grid[layer][prompt][position]``; the innermost level is a plain list of ``str``.

    Args:
        ids: token ids of any shape with at least one axis; -1 reads ``""``.
        words: the text of each id.
    """

    def __init__(self, ids: Int[Tensor, "..."], words: TokenWords) -> None:
        self.ids = ids
        self._words = words

    @overload
    def __getitem__(self, index: int, /) -> Any: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[Any]: ...
    def __getitem__(self, index: int | slice, /) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        picked = self.ids[index]
        if picked.ndim == 0:
            return self._words[int(picked)]
        return [self._words[i] for i in picked.tolist()] if picked.ndim == 1 else WordGrid(picked, self._words)

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def tolist(self) -> list[Any]:
        """All words, as nested lists."""
        return [item.tolist() if isinstance(item, WordGrid) else item for item in self]

    def __eq__(self, other: object) -> bool:
        return self.tolist() == (other.tolist() if isinstance(other, WordGrid) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.tolist()) if self.ids.numel() <= 256 else f"WordGrid(shape={tuple(self.ids.shape)})"
