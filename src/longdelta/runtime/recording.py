"""A body as the list of its launches: what a call costs the host when one like it has been watched.

Note [Recordings]: given a plan, a body (ops/forward.py) does the same in every call whose tensors
look alike: the same views of the same workspace, the same tiles, the same kernels. The second call
that looks like one before is watched: which buffers it allocates, which launches it makes, how far
into which buffer each of their arguments points, and whether torch computes anything besides (a
copy of an unaligned tensor, say: then the body stays as it is). From the third call on the launches
are made from that list, with the addresses of the day (docs/log.md, 2026-11-30, recordings).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longdelta.runtime.driver import Call, Tile, encode
from longdelta.runtime.launch import Program, Scope, is_fresh

_KEPT = 64
"""Recordings of a plan, and encoded tiles of an argument: layers of a model have their own."""


class _Watch(TorchDispatchMode):
    """Sees what torch does: allocations, views, and whether there is anything else."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spaces: list[Tensor] = []
        self.only_launches = True

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        if function is torch.ops.aten.empty.memory_format:
            self.spaces.append(result)
        elif not function.is_view and function is not torch.ops.aten.record_stream.default:
            self.only_launches = False
        return result


class _Place(NamedTuple):
    """Where an argument is: so far into a buffer; a tile there is encoded once."""

    buffer: int
    offset: int
    tile: Tile | None
    how: Any
    encoded: dict[int, list[Any]]

    def words(self, address: int) -> list[Any]:
        """Of the tile of a tensor that lies there."""
        tile = self.tile
        assert tile is not None
        if len(self.encoded) >= _KEPT:
            self.encoded.clear()
        moved = tile.of(address)
        found = self.encoded[address] = [moved] if self.how is None else encode(moved, self.how)
        return found


class Recording:
    """Note [Recordings]. Its buffers: those of the call, those it allocates, and none at all."""

    def __init__(
        self,
        device: torch.device,
        spaces: Sequence[int],
        steps: Sequence[tuple[Program, Call, Sequence[_Place]]],
    ) -> None:
        self._device, self._spaces, self._steps = device, spaces, steps

    def __call__(self, scope: Scope, buffers: Sequence[Tensor | None]) -> None:
        """Makes the launches on the buffers of this call."""
        bases = [0 if x is None else x.data_ptr() for x in buffers]
        # Held until all is launched: from then on the order of the stream protects them.
        held = [torch.empty(n, dtype=torch.uint8, device=self._device) for n in self._spaces]
        bases += [x.data_ptr() for x in held]
        bases.append(0)
        for program, call, places in self._steps:
            words: list[Any] = []
            for place in places:
                address = bases[place.buffer] + place.offset
                if place.tile is None:
                    words.append(address)
                else:
                    words += place.encoded.get(address) or place.words(address)
            program.again(scope, call, words)


def _recording(
    watch: _Watch,
    launches: Sequence[tuple[Program, Sequence[Tensor | Tile]]],
    given: Sequence[Tensor | None],
    made: Sequence[Tensor],
    device: torch.device,
) -> Recording | None:
    """Of a body that has run; None where it cannot be told which buffer an argument lies in."""
    exact = {x.data_ptr(): i for i, x in enumerate(given) if x is not None and x.numel()}
    if len(exact) < sum(x is not None and x.numel() > 0 for x in given):
        return None  # the same tensor came twice; in another call two may come
    fresh = [*made, *watch.spaces]
    ranges = [(x.data_ptr(), x.numel() * x.itemsize, len(given) + i) for i, x in enumerate(fresh)]

    def place(x: Tensor | Tile, how: Any) -> _Place | None:
        tile = x if isinstance(x, Tile) else None
        address = x.data_ptr() if tile is None else tile.address + tile.ahead
        if address in exact:
            return _Place(exact[address], 0, tile, how, {})
        for base, size, buffer in ranges:
            if size and base <= address < base + size:
                return _Place(buffer, address - base, tile, how, {})
        # A tensor without elements has no address; its tile may have that of its buffer's end.
        return _Place(-1, 0, tile, how, {}) if address == 0 else None

    steps = []
    for program, moving in launches:
        call, how = program.known(moving)
        notes = iter(how or [None] * len(moving))
        places = [place(x, next(notes) if isinstance(x, Tile) else None) for x in moving]
        if call is None or None in places or program.device != device:
            return None
        steps.append((program, call, [each for each in places if each is not None]))
    return Recording(device, [x.numel() * x.itemsize for x in watch.spaces], steps)


def _look(x: Tensor | None) -> Hashable:
    """What the launches may depend on besides the address."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() & 15)


class Recordings:
    """The bodies of one plan: Note [Recordings]."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Recording | bool] = {}
        """A recording; whether one is to be made at the next call; or False: there is none."""

    def run(
        self,
        scope: Scope,
        options: Hashable,
        given: Sequence[Tensor | None],
        made: Sequence[Tensor],
        body: Callable[[], None],
    ) -> None:
        """body() in its scope, or the launches that it would make.

        options: all that the body depends on besides the plan and the tensors given, which it
        reads, and made, which it writes.
        """
        if is_fresh():
            body()
            return
        key = (options, *map(_look, given))
        known = self._known.get(key)
        if isinstance(known, Recording):
            known(scope, (*given, *made))
        elif known:
            self._known[key] = self._watched(scope, given, made, body) or False
        else:
            if known is None:
                if len(self._known) >= _KEPT:
                    self._known.clear()
                self._known[key] = True
            body()

    @staticmethod
    def _watched(
        scope: Scope,
        given: Sequence[Tensor | None],
        made: Sequence[Tensor],
        body: Callable[[], None],
    ) -> Recording | None:
        launches: list[tuple[Program, Sequence[Tensor | Tile]]] = []
        scope.watched = launches
        watch = _Watch()
        try:
            with watch:
                body()
        finally:
            scope.watched = None
        if not watch.only_launches:
            return None
        return _recording(watch, launches, given, made, scope.device)
