"""The logit lens inside a vLLM worker: methods that the engine calls by name, taking and giving bytes and plain values.

This is :mod:`murano.reader` where the weights are: the same reader gathers the rows and reduces them, only what was asked for goes home.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from murano.address import Address
from murano.model.product import Choice, TorchProduct
from murano.model.proof import difference, rounding
from murano.model.vllm_worker import EngineModel
from murano.model.wire import pack, unpack
from murano.reader import Reader, Tables

#: What of the tables goes home.
SENT = ("top_ids", "top_probs", "entropy", "log_normalizer", "token_log_probs", "token_ranks", "divergences")


class Readable:
    """The worker's model as a reader asks for it.

    Args:
        engine_model: taken apart and proved.
        vocab_size: how many logits a row has.
    """

    mid: dict[int, Any] = {}  # noqa: RUF012
    anatomy = SimpleNamespace(final_norm="", head="")

    def __init__(self, engine_model: EngineModel, vocab_size: int) -> None:
        self.tail, self.n_layers, self.vocab_size = engine_model.tail, engine_model.n_layers, vocab_size

    def product(self, rows: int, name: str, width: int) -> Choice:
        """The engine multiplies by itself."""
        return Choice("engine", TorchProduct(torch.empty(0, 0)))


class LensWorker:
    """What Murano adds to a worker; vLLM mixes it into the worker's own class."""

    model_runner: Any
    rank: int
    murano_model: EngineModel
    murano_reader: Reader | None
    murano_late: list[tuple[dict[Address, Tensor], Tensor]]
    murano_about: dict[str, Any]

    def murano_watch(self) -> None:
        """Take the model apart, and see what it does in the steps to come."""
        self.murano_model = EngineModel(self.model_runner)
        self.murano_model.watch()

    @torch.inference_mode()
    def murano_prove(self) -> dict[str, Any]:
        """Whether the last layer's lens gives the engine's own logits, for every way in which layers may hold the stream."""
        return self.murano_model.prove()

    def murano_settle(self, holding: str, vocab_size: int) -> None:
        """Read the stream in this way from now on.

        Args:
            holding: how a layer's output holds it.
            vocab_size: how many logits a row has, which only one worker of a group sees.
        """
        self.murano_model.holding = holding
        assert self.murano_model.tail is not None
        self.murano_model.tail.vocab_size = vocab_size

    def murano_ask(self, question: bytes) -> None:
        """What to read of the requests to come.

        Args:
            question: the tensors ``cells`` and ``tokens``, and what else :meth:`murano.model.vllm.VLLMModel.ask` writes.
        """
        tensors, about = unpack(question)
        model = self.murano_model
        assert model.tail is not None
        addresses = [Address.parse(a) for a in about["addresses"]]
        tokens = tensors.get("tokens")
        first = self.rank == 0
        # The other workers of a group have no logits. They do what the first one does, so that its gathers find them, and keep nothing.
        n_tokens = about["n_tokens"] if first else 0
        tables = Tables.empty(
            len(addresses), about["n_cells"], about["top_k"] if first else 1, n_tokens, len(about["divergences"])
        )
        size = (len(addresses), about["n_cells"])
        if first and about["keep"] == "residuals":
            tables.residuals = torch.full((*size, model.like.shape[-1]), torch.nan, dtype=model.like.dtype)
        if first and about["keep"] == "logits":
            tables.logits = torch.full((*size, model.tail.vocab_size), torch.nan)
        readable: Any = Readable(model, model.tail.vocab_size)
        room = max(about["max_chunk_bytes"], 2 * model.tail.vocab_size * model.like.element_size())
        self.murano_reader = reader = Reader(
            readable, addresses, tables, room, "torch", tokens if first else None, about["divergences"]
        )
        self.murano_about, self.murano_late = {}, []

        def on_rows(rows: dict[Address, Tensor], cells: Tensor) -> None:
            if about["late"]:
                self.murano_late.append((rows, cells))
                return
            (reader.keep_rows if about["bare"] else reader.read_rows)(rows, cells)

        if "cells" in tensors:
            model.listen(tensors["cells"], list(dict.fromkeys(reader.sources)), on_rows, self._murano_check)

    def _murano_check(self, row: Tensor, own: Tensor | None) -> None:
        """Hold one row of the last layer against the logits that the engine computed from it."""
        assert self.murano_model.tail is not None
        read = self.murano_model.tail(row)
        if read is not None and own is not None:
            self.murano_about |= {"gap": difference(read.float(), own.float()), "limit": 4 * rounding(own)}

    @torch.inference_mode()
    def murano_feed(self, rows: bytes) -> None:
        """Read residuals that come from outside.

        Args:
            rows: the tensor ``rows``, ``[layer, cell, d_model]``.
        """
        assert self.murano_reader is not None
        stream = unpack(rows)[0]["rows"].to(self.murano_model.like)
        self.murano_reader.read_residuals(stream, torch.ones(stream.shape[1], dtype=torch.bool))

    @torch.inference_mode()
    def murano_answer(self, tokens: bytes | None = None) -> bytes:
        """What was read; nothing on workers that have no logits.

        Args:
            tokens: the tensor ``tokens`` where it is only known now which are asked about: those that were written.
        """
        reader = self.murano_reader
        assert reader is not None
        self.murano_model.steer(self.murano_model.added)
        if tokens is not None and self.rank == 0:
            reader.tokens = unpack(tokens)[0]["tokens"]
        for rows, cells in self.murano_late:
            reader.read_rows(rows, cells)
        reader.flush()
        self.murano_reader, self.murano_late = None, []
        if self.rank != 0:
            return b""
        tables = reader.tables
        found = {name: getattr(tables, name) for name in SENT}
        found |= {name: t for name in ("residuals", "logits") if (t := getattr(tables, name)) is not None}
        # Layers beside each other: what they predict in one cell is much alike, and is sent in fewer bytes.
        found = {name: t.movedim(-1, 0) if name == "divergences" else t.transpose(0, 1) for name, t in found.items()}
        return pack(found, self.murano_about | {"odd": {str(a): note for a, note in tables.odd.items()}})

    def murano_stop(self) -> None:
        """Forget a question that was not answered."""
        self.murano_reader, self.murano_late = None, []
        self.murano_model.steer(self.murano_model.added)

    def murano_add(self, vectors: bytes) -> None:
        """Add vectors to the stream from now on.

        Args:
            vectors: one tensor by layer index; none takes all away.
        """
        self.murano_model.steer({int(layer): vector for layer, vector in unpack(vectors)[0].items()})
