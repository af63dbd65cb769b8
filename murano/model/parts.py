"""Parts: what each block writes into the residual stream, found by following the additions of one watched forward.

A block reads ``resid_pre`` and leaves ``resid_post = keep · resid_pre + Σ scale · part``; ``keep`` is 1 but in the few families that
rescale the stream. Which tensors the parts are differs by family: an
attention's output, the same after another norm, or times a multiplier; a projection inside an attention that adds the residual
itself. No names are assumed. Every sum and every multiplication by a constant in a block is followed back to the tensors that are
neither; those that a module returned can be caught again in any forward. That the sum holds is then proved on other tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from murano.model.anatomy import BATCH, POSITIONS, Anatomy, Block, probe_ids, run, stream_in
from murano.model.linear import Norm, exact, find_norm, is_linear, tolerance
from murano.model.stream import Path, find_tensor, get_at
from murano.model.watch import Call, Watcher, at_rest

#: What leaves the numbers of a tensor, or their order in each row, as they are.
_SAME = {
    *("view", "unsafe_view", "reshape", "clone", "to_copy", "detach", "alias", "unsqueeze", "squeeze", "contiguous"),
    *("expand", "slice", "select", "transpose", "permute", "movedim", "lift_fresh"),
}
_ONE, _ZERO = torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Place:
    """Where a tensor can be caught in a forward.

    Args:
        name: of a module.
        module: the module.
        call: which of its calls in one forward, from 0.
        path: where the tensor lies in what the module returns, or in what it is given.
        given: whether it is one of its arguments.
    """

    name: str
    module: nn.Module
    call: int
    path: Path
    given: bool = False


@dataclass(frozen=True, eq=False)
class Step:
    """What happens to the output of a part's projection on its way into the stream: it is scaled, then normed if there is a norm."""

    scale: Tensor
    module: nn.Module | None
    norm: Norm | None


@dataclass(frozen=True, eq=False)
class Split:
    """The linear module that a part comes out of: its inputs are heads side by side, or neurons.

    Args:
        source: what the module is given.
        width: how many numbers a row of that has.
        steps: what follows the module.
        n_heads: how many heads lie side by side; 0 where there are none.
        biased: whether something is added to what comes of the inputs: a bias of the module, or of a norm after it.
    """

    source: Place
    width: int
    steps: tuple[Step, ...]
    n_heads: int
    biased: bool


@dataclass(frozen=True, eq=False)
class Part:
    """Something that a block adds to the stream.

    Args:
        layer: of the block.
        component: ``"attn_out"`` if it carries something from one position to another (attention, or what stands in its place),
            ``"mlp_out"`` if it does not.
        place: where it can be caught.
        scale: what it is multiplied with before it is added.
        split: how it comes about, where it is the output of a linear module.
    """

    layer: int
    component: str
    place: Place
    scale: Tensor
    split: Split | None

    @property
    def heads(self) -> int:
        """Into how many heads it can be divided; 0 for none."""
        return self.split.n_heads if self.split is not None and self.component == "attn_out" else 0


@dataclass(frozen=True)
class Parts:
    """The parts of all blocks.

    Args:
        parts: in the order of the data; empty where they could not be found or proved.
        keeps: what each block multiplies the stream with that it was given; empty where there are no parts.
        difference: the largest difference between what a block added and the sum of its parts, relative to the stream.
        reason: why there are none.
    """

    parts: tuple[Part, ...]
    keeps: tuple[Tensor, ...] = ()
    difference: float = 0.0
    reason: str = ""

    def of(self, layer: int, component: str) -> list[Part]:
        """The parts of one block that one component is made of."""
        return [part for part in self.parts if (part.layer, part.component) == (layer, component)]


def find_parts(anatomy: Anatomy) -> Parts:
    """Find what each block writes, and prove on other tokens that it is all that it writes.

    Args:
        anatomy: a model and its blocks.

    Returns:
        The parts, or the reason why there are none: a family that norms the sum has none.
    """
    if not anatomy.layout.standard:
        return Parts((), reason=f"the stream is not one vector per position but {anatomy.layout}")
    name = type(anatomy.model).__name__
    try:
        sums = _follow(anatomy)
        ways = [{atom: _way(atom, anatomy) for atom in found.terms if atom is not found.residual} for found in sums]
        children = {origin.child for way in ways for origin, _ in way.values() if origin.child is not None}
        mixing = _mixing(anatomy, [(call.name, sums[0].numbers[call]) for call in children])
        parts = tuple(
            p
            for layer, (found, way) in enumerate(zip(sums, ways, strict=True))
            for p in _parts(layer, found, way, mixing)
        )
        keeps = tuple(found.terms[found.residual] for found in sums)
        return Parts(parts, keeps, _prove(anatomy, parts, keeps))
    except _NoParts as why:
        return Parts((), reason=f"in {name} {why}")


class _NoParts(Exception):
    """The parts of a block can't be told apart; says why."""


# -------------------------------------------------------------------------------------------------------- following


@dataclass(eq=False)
class _Atom:
    """A tensor in a block that is no sum.

    Args:
        born: when it was first seen.
        child: the call of the block's own child in which that was.
        seen: the places where a module returned it, innermost first.
        source: the atom that it was made of alone, the scale of that, and the module that made it, if it was one.
    """

    born: int
    child: Call | None = None
    seen: list[tuple[Call, Place]] = field(default_factory=list)
    source: tuple[_Atom, Tensor, Call | None] | None = None


_Terms = dict[_Atom, Tensor]


class _Follower(TorchDispatchMode):
    """Knows of each tensor of the stream's size in the present block of which atoms it is the sum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stream: Tensor | None = None
        self.residual = _Atom(-1)
        self.terms: dict[int, _Terms] = {}
        self.kept: list[Tensor] = []  # so that an address in memory is not used again
        self.running: list[tuple[Call, int]] = []
        self.merged: tuple[int, int] = (0, 0)
        self.clock = 0

    def open(self, stream: Tensor) -> None:
        self.terms, self.kept, self.running = {}, [], []
        self.stream, self.residual = stream, _Atom(-1)
        self.set(stream, {self.residual: _ONE})

    def fits(self, value: Any) -> bool:
        """Whether this may be the stream, or something that is added to it."""
        stream = self.stream
        return (
            isinstance(value, Tensor)
            and stream is not None
            and value.is_floating_point()
            and value.numel() == stream.numel()
            and value.shape[-1] == stream.shape[-1]
        )

    def set(self, tensor: Tensor, terms: _Terms) -> None:
        self.kept.append(tensor)
        self.terms[id(tensor)] = terms

    def of(self, tensor: Tensor) -> _Terms:
        if id(tensor) not in self.terms:
            self.clock += 1
            atom = _Atom(self.clock, self.running[0][0] if self.running else None)
            self.set(tensor, {atom: _ONE})
        return self.terms[id(tensor)]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if self.stream is not None and isinstance(out, Tensor):
            with torch.utils._python_dispatch._disable_current_modes():
                self._note(function.overloadpacket.__name__.strip("_"), args, kwargs, out)
        return out

    def _note(self, name: str, args: Any, kwargs: Any, out: Tensor) -> None:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if (
            first is not None
            and name in _SAME
            and first.ndim >= 3
            and out.shape[-1] == first.shape[-1] * first.shape[-2]
        ):
            self.merged = (out.shape[-1], first.shape[-2])
        terms: _Terms | None = None
        if first is not None and out.is_floating_point() and out.numel() == self.kept[0].numel():
            terms = self._terms(name, args, kwargs)
        if terms is not None:
            self.set(out, terms)
        else:  # an address of an earlier tensor, or one that was changed in place
            self.terms.pop(id(out), None)

    def _terms(self, name: str, args: Any, kwargs: Any) -> _Terms | None:
        if name in _SAME:
            return self.terms.get(id(args[0]))
        if name == "neg":
            return _scaled(self.of(args[0]), -1.0)
        if name in ("add", "sub", "mul", "div") and len(args) >= 2:
            a, b = args[:2]
            if name in ("add", "sub"):
                if not (self.fits(a) and self.fits(b)):
                    return None
                sign = float(kwargs.get("alpha", args[2] if len(args) > 2 else 1)) * (1 if name == "add" else -1)
                return _added(self.of(a), _scaled(self.of(b), sign))
            if self.fits(a) and self._constant(b):
                value = torch.as_tensor(b, dtype=torch.float64).detach().cpu().reshape(-1).squeeze()
                return _scaled(self.of(a), value if name == "mul" else 1 / value)
            if name == "mul" and self.fits(b) and self._constant(a):
                return _scaled(self.of(b), torch.as_tensor(a, dtype=torch.float64).detach().cpu().reshape(-1).squeeze())
        return None

    def _constant(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            width = self.kept[0].shape[-1]
            return value.numel() == 1 or (value.numel() == width and value.shape[-1] == width)
        return isinstance(value, (int, float))

    def leave(self, call: Call, number: int) -> None:
        """A module inside the block has returned."""
        started = next((at for running, at in reversed(self.running) if running is call), 0)
        path = find_tensor(call.output, self.fits)
        if path is not None:
            terms = self.of(get_at(call.output, path))
            if self.residual not in terms:
                self._place(terms, call, Place(call.name, call.module, number, path), started)
        self.running = [frame for frame in self.running if frame[0] is not call]

    def _place(self, terms: _Terms, call: Call, place: Place, started: int) -> None:
        inside = all(atom.born > started for atom in terms)
        (first, scale), *more = terms.items()
        if more or not _is_one(scale):
            if not inside:
                return
            self.clock += 1
            new = _Atom(self.clock, self.running[0][0], source=None if more else (first, scale, None))
            self.set(get_at(call.output, place.path), {new: _ONE})
            first = new
        if not first.seen and (given := self._given(call, started)) is not None:
            first.source = (*given, call)
        first.seen.append((call, place))

    def _given(self, call: Call, started: int) -> tuple[_Atom, Tensor] | None:
        """The one atom that a module was given, and its scale."""
        inputs = [value for value in call.inputs.values() if self.fits(value)]
        terms = self.terms.get(id(inputs[0])) if len(inputs) == 1 else None
        if terms is None or len(terms) != 1 or self.residual in terms:
            return None
        ((atom, scale),) = terms.items()
        return (atom, scale) if atom.born <= started else None


def _scaled(terms: _Terms, by: Any) -> _Terms:
    return {atom: scale * by for atom, scale in terms.items()}


def _added(a: _Terms, b: _Terms) -> _Terms:
    return {atom: a.get(atom, 0.0) + b.get(atom, _ZERO) for atom in {**a, **b}}


def _is_one(scale: Tensor) -> bool:
    return scale.ndim == 0 and float(scale) == 1.0


@dataclass(eq=False)
class _Sum:
    """What a block was seen to return.

    Args:
        block: the block.
        terms: the sum.
        residual: the atom that stands for what the block was given.
        numbers: which of its module's calls each call was.
        merged: width and number of what was last laid side by side when a call began: the heads of an attention, say.
    """

    block: Block
    terms: _Terms
    residual: _Atom
    numbers: dict[Call, int]
    merged: dict[Call, tuple[int, int]]


def _follow(anatomy: Anatomy) -> list[_Sum]:
    """Watch one forward; the sum that each block call returned."""
    ids = probe_ids(anatomy.model, anatomy.embedding_rows, BATCH, POSITIONS, seed=6)
    names = {block.name for block in anatomy.blocks}
    follower = _Follower()
    counts: dict[str, int] = {}
    numbers: dict[Call, int] = {}
    merged: dict[Call, tuple[int, int]] = {}
    found: list[_Sum] = []
    inside: list[Call] = []

    def on_enter(call: Call) -> None:
        numbers[call] = counts.get(call.name, 0)
        counts[call.name] = numbers[call] + 1
        if inside:
            follower.running.append((call, follower.clock))
            merged[call] = follower.merged
        elif call.name in names:
            inside.append(call)
            follower.open(stream_in(anatomy.blocks[len(found)], call.args, call.kwargs))

    def on_exit(call: Call) -> None:
        if inside and call is not inside[0]:
            follower.leave(call, numbers[call])
        elif inside:
            inside.clear()
            block = anatomy.blocks[len(found)]
            terms = follower.of(get_at(call.output, block.output_path))
            found.append(_Sum(block, terms, follower.residual, numbers, merged))
            follower.stream = None

    with at_rest(anatomy.model), Watcher(anatomy.model, on_enter, on_exit), follower:
        run(anatomy.model, ids)
    for layer, (block, sums) in enumerate(zip(anatomy.blocks, found, strict=True)):
        if sums.residual not in sums.terms:
            raise _NoParts(
                f"block {layer} ({block.name}) does not add to the stream but writes it anew, after a norm say"
            )
    return found


def _parts(
    layer: int, sums: _Sum, ways: Mapping[_Atom, tuple[_Atom, list[Step]]], mixing: Collection[tuple[str, int]]
) -> list[Part]:
    """The parts of one block.

    Raises:
        _NoParts: what it returns is not the stream plus what its modules returned.
    """
    parts = []
    for atom, (origin, steps) in ways.items():
        if not atom.seen:
            raise _NoParts(f"block {layer} ({sums.block.name}) adds something that no module of it returns")
        mixes = origin.child is not None and (origin.child.name, sums.numbers[origin.child]) in mixing
        component = "attn_out" if mixes else "mlp_out"
        parts.append(Part(layer, component, atom.seen[-1][1], sums.terms[atom], _split(origin, steps, sums)))
    return sorted(parts, key=lambda part: part.component)


def _way(atom: _Atom, anatomy: Anatomy) -> tuple[_Atom, list[Step]]:
    """The atom that another follows from by scales and norms alone, and these, in their order."""
    steps: list[Step] = []
    while atom.source is not None and (step := _step(atom, anatomy)) is not None:
        steps.insert(0, step)
        atom = atom.source[0]
    return atom, steps


def _step(atom: _Atom, anatomy: Anatomy) -> Step | None:
    """How an atom follows from the one before it, if it is that one scaled, or normed."""
    assert atom.source is not None
    _, scale, call = atom.source
    if call is None:
        return Step(scale, None, None)
    norm = find_norm(call.module, anatomy.d_model, anatomy.stream_dtype, _device(call.module))
    return Step(scale, call.module, norm) if norm is not None else None


def _split(origin: _Atom, steps: list[Step], sums: _Sum) -> Split | None:
    """The linear module that an atom came out of."""
    if not origin.seen:
        return None
    call, place = origin.seen[0]
    given = call.args[0] if len(call.args) == 1 and not call.kwargs else None
    if not isinstance(given, Tensor) or any(True for _ in call.module.children()) or not given.is_floating_point():
        return None
    width = given.shape[-1]
    if not is_linear(call.module, width, given.dtype, given.device):
        return None
    merged, n_heads = sums.merged[call]
    heads = n_heads if merged == width and n_heads < width else 0
    with torch.no_grad():
        biased = bool(call.module(given.new_zeros(1, 1, width)).any())
    biased |= any(step.norm is not None and bool(step.norm.bias.any()) for step in steps)
    return Split(Place(place.name, place.module, place.call, (0,), True), width, tuple(steps), heads, biased)


def _mixing(anatomy: Anatomy, children: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
    """Which calls of modules carry something from one position to another.

    In one forward, each is given the first prompt twice, the second time with another first position: where it then returns
    something else at a later position, it does.
    """
    found: set[tuple[str, int]] = set()

    def fits(value: Any) -> bool:
        """Whether it has a row for each position of each prompt."""
        rows = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
        return rows and (value.shape[:2] == (BATCH, POSITIONS) or value.shape[0] == BATCH * POSITIONS)

    def doubled(value: Any) -> Any:
        if not fits(value):
            return value
        rows = value.clone().reshape(BATCH, POSITIONS, -1)
        rows[1] = rows[0]
        rows[1, 0] = rows[1, 0].flip(-1) + 1
        return rows.view(value.shape)

    def hooks_of(name: str, module: nn.Module) -> list[Any]:
        calls = 0

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return tuple(map(doubled, args)), {key: doubled(value) for key, value in kwargs.items()}

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            nonlocal calls
            path = find_tensor(output, fits)
            if path is not None:
                rows = get_at(output, path).reshape(BATCH, POSITIONS, -1)
                if bool((rows[0] - rows[1])[1:].abs().max() > 1e-4 * rows[:2].abs().max()):
                    found.add((name, calls))
            calls += 1

        return [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]

    ids = probe_ids(anatomy.model, anatomy.embedding_rows, BATCH, POSITIONS, seed=6)
    hooks = [
        hook for name in {name for name, _ in children} for hook in hooks_of(name, anatomy.model.get_submodule(name))
    ]
    try:
        with at_rest(anatomy.model):
            run(anatomy.model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _device(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters() if p.device.type != "meta"), torch.device("cpu"))


# --------------------------------------------------------------------------------------------------------- catching

Take = Callable[[Tensor], Tensor]


@contextlib.contextmanager
def catching(places: Sequence[Place], take: Take) -> Iterator[dict[Place, Tensor]]:
    """Catch tensors while a forward runs.

    Args:
        places: where.
        take: what is kept of a tensor: a copy, for the model may go on to change it.

    Returns:
        What was caught, by place; filled while the forward runs.
    """
    caught: dict[Place, Tensor] = {}
    hooks: list[Any] = []
    wanted: dict[tuple[nn.Module, bool], list[Place]] = {}
    for place in places:
        wanted.setdefault((place.module, place.given), []).append(place)

    def hook_for(here: list[Place]) -> Callable[[Any], None]:
        calls = 0

        def hook(structure: Any) -> None:
            nonlocal calls
            for place in here:
                if place.call == calls:
                    caught[place] = take(get_at(structure, place.path))
            calls += 1

        return hook

    for (module, given), here in wanted.items():
        hook = hook_for(here)
        if given:
            hooks.append(module.register_forward_pre_hook(lambda _m, args, hook=hook: hook(args)))
        else:
            hooks.append(module.register_forward_hook(lambda _m, _args, output, hook=hook: hook(output)))
    try:
        yield caught
    finally:
        for handle in hooks:
            handle.remove()


def _prove(anatomy: Anatomy, parts: Sequence[Part], keeps: Sequence[Tensor]) -> float:
    """Run other tokens, and compare what every block added with the sum of its parts, in every element.

    Raises:
        _NoParts: they differ, or a block does not begin with what the one before it left.
    """
    ids = probe_ids(anatomy.model, anatomy.embedding_rows, BATCH, POSITIONS, seed=7)
    pre: list[Tensor] = []
    post: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pre.append(stream_in(anatomy.blocks[len(pre)], args, kwargs).clone())

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        post.append(get_at(output, anatomy.blocks[len(post)].output_path).clone())

    hooks: list[Any] = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in anatomy.modules]
    hooks += [m.register_forward_hook(leave) for m in anatomy.modules]
    try:
        with catching([part.place for part in parts], Tensor.clone) as caught, at_rest(anatomy.model):
            run(anatomy.model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    worst = 0.0
    for layer, (before, after) in enumerate(zip(pre, post, strict=True)):
        own = [part for part in parts if part.layer == layer]
        total = keeps[layer].to(before.device) * exact(before)
        for part in own:
            if part.place not in caught:
                raise _NoParts(f"block {layer} does not call {part.place.name} in every forward")
            total = total + part.scale.to(total.device) * exact(caught[part.place]).reshape(total.shape)
        size = float(torch.stack([before.abs().max(), after.abs().max()]).max())
        apart = float((total - exact(after)).abs().max()) / max(size, 1e-30)
        if not apart <= tolerance(after.dtype):
            raise _NoParts(
                f"what block {layer} writes is not the sum of what was found, but off by {apart:.2g} of the stream"
            )
        if layer and not torch.equal(before.to(post[layer - 1].device), post[layer - 1]):
            raise _NoParts(f"block {layer} does not begin with what block {layer - 1} left")
        worst = max(worst, apart)
    return worst
