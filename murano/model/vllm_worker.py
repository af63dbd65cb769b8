"""What is done inside a vLLM worker: the stream is read as it leaves the layers, and becomes logits by the engine's own modules.

Nothing is written down per family. The layers are the longest list of modules that run one after another; how their outputs hold the
stream, and which modules stand between the last of them and ``compute_logits``, is what makes the engine's own logits come out again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from murano.address import Address
from murano.errors import UnsupportedModelError
from murano.model.product import Product
from murano.model.proof import difference, rounding

#: Requests whose rows are read are called this and a number.
PREFIX = "murano-"


def _flat(tensor: Tensor) -> Float[Tensor, "row d_model"]:
    """A row for each token: vLLM runs transformers' own code, where it has none of a family, with one prompt of all tokens."""
    return tensor.reshape(-1, tensor.shape[-1])


def holdings(output: Any) -> dict[str, Float[Tensor, "row d_model"]]:
    """Every way in which what a layer returns may hold the stream, by name.

    vLLM's layers return ``(hidden, residual)`` to be summed, a pair whose first already holds the sum, or one tensor.
    """
    if isinstance(output, Tensor):
        return {"tensor": _flat(output)}
    if not isinstance(output, (tuple, list)) or not output or not isinstance(output[0], Tensor):
        return {}
    first, second = output[0], output[1] if len(output) > 1 else None
    if not isinstance(second, Tensor) or second.shape != first.shape:
        return {"first": _flat(first)}
    return {"first": _flat(first), "sum": _flat(first + second)}


def stream_rows(output: Any, holding: str, rows: Int[Tensor, " row"]) -> Float[Tensor, "row d_model"]:
    """Some rows of the stream, copied: the engine goes on to write into what a layer returned."""
    if holding == "tensor":
        return _flat(output)[rows]
    first = _flat(output[0])[rows]
    return first + _flat(output[1])[rows] if holding == "sum" else first


def with_added(output: Any, vector: Tensor) -> Any:
    """What a layer returns, with a vector added to the stream at every position."""
    if isinstance(output, Tensor):
        return output + vector
    return type(output)([output[0] + vector, *output[1:]])


@dataclass(frozen=True)
class Scheduled:
    """One request in one step of the engine.

    Args:
        request: its id.
        start: its first row in the step's tensors.
        length: how many rows it has there.
        position: of the first of them in the prompt: more than 0 in a later chunk of a prompt, and while generating.
    """

    request: str
    start: int
    length: int
    position: int


class EngineTail:
    """From the stream after the last layer to logits, by the engine's own modules: what :class:`murano.reader.Reader` asks of a tail.

    Args:
        chain: the modules between the last layer and ``compute_logits``: the final norm, mostly.
        compute_logits: the engine's own, with its scales, soft-caps and gathers.
        vocab_size: how many logits a row has.
        like: says the dtype and device of the stream.
    """

    name = "short"
    finish = None
    weight = bias = tiles = None

    def __init__(
        self,
        chain: Sequence[nn.Module],
        compute_logits: Callable[[Tensor], Tensor | None],
        vocab_size: int,
        like: Tensor,
    ) -> None:
        self.chain, self.compute_logits, self.vocab_size, self.like = tuple(chain), compute_logits, vocab_size, like

    def hidden(self, rows: Float[Tensor, "row d_model"]) -> Float[Tensor, "row d_head"]:
        """What ``compute_logits`` is given."""
        hidden: Any = rows.to(self.like)
        for module in self.chain:
            hidden = module(hidden)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return hidden  # type: ignore[no-any-return]

    def __call__(self, rows: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocab"] | None:
        """Logits of rows; ``None`` on the workers of a tensor-parallel group to which they are not gathered."""
        return self.compute_logits(self.hidden(rows))

    def project(
        self, rows: Float[Tensor, "row d_model"], out: Tensor, product: Product | None = None
    ) -> Float[Tensor, "row vocab"]:
        """Logits of rows; where they are gathered elsewhere, something to go on with."""
        logits = self(rows)
        return rows.new_zeros(len(rows), 2) if logits is None else logits

    def buffer(self, rows: int, vocab: int) -> Tensor:
        """Says how large the logits of that many rows are; the engine allocates them itself."""
        return self.like.new_empty(1, 1).expand(rows, vocab)


@dataclass
class Step:
    """What was seen of one step of the engine while its model was watched."""

    rows: list[Scheduled]
    order: list[int] = field(default_factory=list)
    kinds: list[tuple[str, ...]] = field(default_factory=list)
    last: dict[str, Tensor] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)
    logits: Tensor | None = None
    done: bool = False


class EngineModel:
    """The model of a worker, taken apart.

    Args:
        runner: the worker's model runner.

    Raises:
        UnsupportedModelError: no layers can be found.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.model: nn.Module = runner.get_model()
        lists = [
            (name, module)
            for name, module in self.model.named_modules()
            if isinstance(module, nn.ModuleList) and all(any(True for _ in child.children()) for child in module)
        ]
        if not lists:
            raise UnsupportedModelError(f"{type(self.model).__name__} has no list of layers.")
        self.layers_name, found = max(lists, key=lambda item: len(item[1]))
        self.layers = list(found)
        self.holding = ""
        self.tail: EngineTail | None = None
        self.steps: list[Step] = []
        self.added: dict[int, Tensor] = {}
        self.own: Callable[[Tensor], Tensor | None] = self.model.compute_logits
        self._hooks: list[Any] = []

    @property
    def n_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    # What the scheduler put into a step

    def scheduled(self) -> list[Scheduled]:
        """The requests in the step that is running, in the order of their rows."""
        batch = self.runner.input_batch
        starts, computed = self.runner.query_start_loc.np, batch.num_computed_tokens_cpu
        return [
            Scheduled(request, int(starts[i]), int(starts[i + 1] - starts[i]), int(computed[i]))
            for i, request in enumerate(batch.req_ids[: batch.num_reqs])
        ]

    # Finding and proving the way to the logits

    def watch(self) -> None:
        """See what the model does in the steps to come."""
        self.steps = []
        inside = {id(m) for layer in self.layers for m in layer.modules()}
        around = {
            name for name, module in self.model.named_modules() if any(m in self.layers for m in module.modules())
        }

        def enter(module: nn.Module, args: Any) -> None:
            self.steps.append(Step(self.scheduled()))

        def leave(index: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                step, found = self.steps[-1], holdings(output)
                step.order.append(index)
                step.kinds.append(tuple(found))
                if index == self.n_layers - 1:
                    step.last = {name: stream.clone() for name, stream in found.items()}

            return hook

        def after(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if self.steps and self.steps[-1].last and not self.steps[-1].done:
                    self.steps[-1].after.append(name)

            return hook

        def compute_logits(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
            self.steps[-1].done = True
            logits = self.own(hidden, *args, **kwargs)
            self.steps[-1].logits = None if logits is None else logits.clone()
            return logits

        self._hooks.append(self.layers[0].register_forward_pre_hook(enter))
        self._hooks += [layer.register_forward_hook(leave(i)) for i, layer in enumerate(self.layers)]
        self._hooks += [
            module.register_forward_hook(after(name))
            for name, module in self.model.named_modules()
            if name and name not in around and id(module) not in inside
        ]
        self.model.compute_logits = compute_logits  # type: ignore[assignment]

    def prove(self) -> dict[str, Any]:
        """Whether the stream of the last layer, read by itself, gives the logits that the engine itself computed.

        All steps were run before any is read: so nothing that the model may remember of a step can help.

        Returns:
            Plain values: for each way to hold the stream the largest difference of a logit, or what stands in the way.
        """
        self.unhook()
        name = type(self.model).__name__
        facts: dict[str, Any] = {"class": name, "n_layers": self.n_layers, "layers": self.layers_name}
        if not self.steps or any(step.order != list(range(self.n_layers)) for step in self.steps):
            seen = self.steps[0].order if self.steps else []
            return {
                **facts,
                "problem": f"its {self.n_layers} layers ({self.layers_name}) do not run one after another: {seen}",
            }
        kinds = {kind for step in self.steps for kind in step.kinds}
        if len(kinds) != 1 or not (ways := kinds.pop()):
            return {**facts, "problem": f"its layers do not all return the stream in one form: {sorted(kinds)}"}
        after = self.steps[0].after
        chain = [n for n in after if not any(n.startswith(f"{other}.") for other in after)]
        like = self.steps[0].last[ways[0]][:1]
        logits = self.steps[0].logits
        vocab = 0 if logits is None else logits.shape[-1]
        self.tail = EngineTail([self.model.get_submodule(n) for n in chain], self.own, vocab, like)
        gaps: dict[str, float] = dict.fromkeys(ways, 0.0)
        alone: dict[str, float] = dict.fromkeys(ways, 0.0)
        scale, limit = 0.0, 0.0
        for step in self.steps:
            ends = torch.tensor([s.start + s.length - 1 for s in step.rows], device=like.device)
            for way in ways:  # every worker of a group takes every turn, for the gathers wait for all of them
                stream = step.last[way]
                read = self.tail.compute_logits(self.tail.hidden(stream)[ends])
                rows = [self.tail(stream[end : end + 1]) for end in ends]
                if read is not None and step.logits is not None:
                    gaps[way] = max(gaps[way], difference(read, step.logits))
                    alone[way] = max(alone[way], difference(torch.cat([r for r in rows if r is not None]), step.logits))
            if step.logits is not None:
                scale = max(scale, float(step.logits[step.logits.isfinite()].abs().max()))
                limit = max(limit, rounding(step.logits))
        self.steps = []
        dtype = "" if logits is None else str(logits.dtype).removeprefix("torch.")
        found = {"chain": chain, "gaps": gaps, "alone": alone, "scale": scale, "limit": limit, "vocab_size": vocab}
        form = {"d_model": like.shape[-1], "dtype": str(like.dtype).removeprefix("torch."), "logits_dtype": dtype}
        return {**facts, **found, **form, "device": str(like.device)}

    def unhook(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.model.compute_logits = self.own  # type: ignore[assignment]

    # Reading

    def listen(
        self,
        cells: Int[Tensor, "request position"],
        wanted: Sequence[Address],
        on_rows: Callable[[dict[Address, Tensor], Tensor], None],
        on_check: Callable[[Tensor, Tensor | None], None],
    ) -> None:
        """Hand out the stream of the steps to come.

        Args:
            cells: where the row of each position of each request goes; -1 where it is not read.
            wanted: which places of the stream.
            on_rows: given the rows of one step at each place, the last layer's always among them, and their cells.
            on_check: given one row of the last layer and the logits that the engine itself computes from it; once.
        """
        self.unhook()
        last = self.n_layers - 1
        # What enters a layer is what left the one before it.
        leaving = {a: a.layer - (a.component == "resid_pre") for a in wanted if a.layer is not None}
        leaving[Address(last)] = last
        entering = [a for a in wanted if leaving.get(a, -1) < 0]
        taken: dict[Address, Tensor] = {}
        now: dict[str, Any] = {}
        unchecked = True

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rows, places, device = [], [], self.like.device
            now["scheduled"] = self.scheduled()
            for s in now["scheduled"]:
                if s.request.startswith(PREFIX):
                    request = int(s.request[len(PREFIX) :].split("-")[0])
                    place = cells[request, s.position : s.position + s.length].long()
                    rows.append(torch.arange(s.start, s.start + len(place))[place >= 0])
                    places.append(place[place >= 0])
            now["rows"] = torch.cat(rows).to(device) if rows else torch.empty(0, dtype=torch.long, device=device)
            now["cells"] = torch.cat(places) if places else torch.empty(0, dtype=torch.long)
            taken.clear()
            if entering and len(now["cells"]):
                stream = next(
                    v
                    for v in (*args, *kwargs.values())
                    if isinstance(v, Tensor) and v.is_floating_point() and v.shape[-1] == self.like.shape[-1]
                )
                taken.update({a: _flat(stream)[now["rows"]] for a in entering})

        def leave(index: int) -> Callable[..., Any]:
            def hook(module: nn.Module, args: Any, output: Any) -> Any:
                if index in self.added:
                    output = with_added(output, self.added[index])
                if len(now["cells"]):
                    here = [a for a, layer in leaving.items() if layer == index]
                    taken.update({a: stream_rows(output, self.holding, now["rows"]) for a in here})
                    if index == last:
                        end = now["scheduled"][0].start + now["scheduled"][0].length - 1
                        now["end"] = stream_rows(output, self.holding, torch.tensor([end], device=self.like.device))
                        on_rows(dict(taken), now["cells"])
                return output if index in self.added else None

            return hook

        def compute_logits(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
            nonlocal unchecked
            logits = self.own(hidden, *args, **kwargs)
            if unchecked and "end" in now:
                unchecked = False
                on_check(now["end"], None if logits is None else logits[:1].clone())
            return logits

        self._hooks.append(self.layers[0].register_forward_pre_hook(enter, with_kwargs=True))
        self._hooks += [layer.register_forward_hook(leave(i)) for i, layer in enumerate(self.layers)]
        self.model.compute_logits = compute_logits  # type: ignore[assignment]

    def steer(self, vectors: Mapping[int, Tensor]) -> None:
        """Add a vector to what leaves each of these layers, at every position, from now on; none takes all away."""
        self.unhook()
        self.added = {layer: vector.to(self.like) for layer, vector in vectors.items()}

        def add(index: int) -> Callable[..., Any]:
            def hook(module: nn.Module, args: Any, output: Any) -> Any:
                return with_added(output, self.added[index])

            return hook

        self._hooks += [self.layers[i].register_forward_hook(add(i)) for i in self.added]

    @property
    def like(self) -> Tensor:
        """Says the dtype, width and device of the stream."""
        assert self.tail is not None
        return self.tail.like
