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
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from longdelta.runtime.driver import Call, Tile, encode
from longdelta.runtime.launch import Program, Scope, is_fresh

_KEPT = 64
"""Recordings of a plan, and encoded tiles of an argument: layers of a model have their own."""
_TRIES = 3
"""A body is watched again where it computed: tables of a plan may be made in a second call, too."""


class _Watch(TorchDispatchMode):
    """Sees what torch does: what it allocates, and whether it computes anything."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spaces: list[Tensor] = []
        self.only_launches = True

    def __enter__(self) -> _Watch:
        # Not torch's own, which sets flags of the process, whatever other threads do meanwhile.
        _push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        _pop_mode()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else dynamo is imported, in the middle of a call

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        if function is torch.ops.aten.empty.memory_format:
            self.spaces += [] if result.is_meta else [result]
        elif function is not torch.ops.aten.record_stream.default:
            self.only_launches &= _is_view(function, arguments, result)
        return result


def _is_view(function: Any, arguments: Sequence[Any], result: Any) -> bool:
    """By the memory: what composite operations do shows in their results alone."""
    if function._schema.is_mutable or not isinstance(result, Tensor):
        return False
    held = {x.untyped_storage()._cdata for x in arguments if isinstance(x, Tensor)}
    return result.untyped_storage()._cdata in held


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


class _New(NamedTuple):
    """A buffer that a body has for itself or as a result: which, and what it looks like."""

    buffer: int
    shape: torch.Size
    dtype: torch.dtype


class _Step(NamedTuple):
    """One launch, after the buffers that no launch before it needed."""

    new: list[_New]
    program: Program
    call: Call
    places: list[_Place]


class Recording:
    """Note [Recordings]. Its buffers: those given, its results, its workspace, and none at all.

    A buffer is allocated before the first launch that needs it: the first launch waits for few.
    """

    def __init__(
        self, device: torch.device, given: int, made: int, steps: list[_Step], unused: list[_New]
    ) -> None:
        self._device, self._steps, self._unused = device, steps, unused
        self._results = range(given, given + made)
        new = sum(len(step.new) for step in steps) + len(unused)
        self._rest = [0] * (new + 1)

    def __call__(self, scope: Scope, given: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Makes the launches on the tensors of this call; its results."""
        # Held until all is launched: from then on the order of the stream protects them.
        held: dict[int, Tensor] = {}
        bases = [0 if x is None else x.data_ptr() for x in given]
        bases += self._rest
        for step in self._steps:
            for new in step.new:
                x = held[new.buffer] = torch.empty(new.shape, dtype=new.dtype, device=self._device)
                bases[new.buffer] = x.data_ptr()
            words: list[Any] = []
            for place in step.places:
                address = bases[place.buffer] + place.offset
                if place.tile is None:
                    words.append(address)
                else:
                    words += place.encoded.get(address) or place.words(address)
            step.program.again(scope, step.call, words)
        for new in self._unused:
            held[new.buffer] = torch.empty(new.shape, dtype=new.dtype, device=self._device)
        return tuple([held[buffer] for buffer in self._results])


def _recording(
    watch: _Watch,
    launches: Sequence[tuple[Program, Sequence[Tensor | Tile]]],
    given: Sequence[Tensor | None],
    made: Sequence[Tensor],
    with_parts: Tensor | None,
    device: torch.device,
) -> Recording | None:
    """Of a body that has run; None where it cannot be told which buffer an argument lies in."""
    exact = {x.data_ptr(): i for i, x in enumerate(given) if x is not None and x.numel()}
    if len(exact) < sum(x is not None and x.numel() > 0 for x in given):
        return None  # the same tensor came twice; in another call two may come
    fresh = dict(enumerate((*made, *watch.spaces), start=len(given)))
    within = (
        fresh if with_parts is None else fresh | {exact.get(with_parts.data_ptr(), -1): with_parts}
    )

    def place(x: Tensor | Tile, how: Any) -> _Place | None:
        tile = x if isinstance(x, Tile) else None
        address = x.data_ptr() if tile is None else tile.address + tile.ahead
        if address in exact:
            return _Place(exact[address], 0, tile, how, {})
        for buffer, whole in within.items():
            if 0 <= address - whole.data_ptr() < whole.nbytes:
                return _Place(buffer, address - whole.data_ptr(), tile, how, {})
        # A tensor without elements has no address.
        return _Place(-1, 0, tile, how, {}) if address == 0 else None

    new = {buffer: _New(buffer, x.shape, x.dtype) for buffer, x in fresh.items()}
    steps = []
    for program, moving in launches:
        call, how = program.known(moving)
        notes = iter(how or [None] * len(moving))
        found = [place(x, next(notes) if isinstance(x, Tile) else None) for x in moving]
        places = [each for each in found if each is not None]
        if call is None or len(places) < len(found) or program.device != device:
            return None
        needed = [new.pop(each.buffer) for each in places if each.buffer in new]
        steps.append(_Step(needed, program, call, places))
    results = len(given) + len(made)
    unused = [each for each in new.values() if each.buffer < results]
    return Recording(device, len(given), len(made), steps, unused)


def _look(x: Tensor | None) -> Hashable:
    """What the launches may depend on besides the address."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() & 15)


class Recordings:
    """The bodies of one plan: Note [Recordings]."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Recording | int] = {}
        """A recording, or how often the body is still watched for one."""

    def run(
        self,
        scope: Scope,
        options: Hashable,
        given: Sequence[Tensor | None],
        make: Callable[[], tuple[Tensor, ...]],
        body: Callable[..., None],
        with_parts: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """made = make(); body(*made) in its scope, or the launches that this would make; made.

        options: all that the body and its results depend on besides the plan and the tensors given,
        which it reads. make: allocates the results, which the body writes, each as a whole.
        with_parts: the one of the given of which launches take parts; no other overlaps it.
        """
        if is_fresh():
            made = make()
            body(*made)
            return made
        key = (options, *map(_look, given))
        known = self._known.get(key)
        if isinstance(known, Recording):
            return known(scope, given)
        made = make()
        if known:
            found = self._watched(scope, given, made, with_parts, body)
            self._known[key] = known - 1 if found is None else found
        else:
            body(*made)
            if known is None:
                if len(self._known) >= _KEPT:
                    self._known.clear()
                self._known[key] = _TRIES
        return made

    @staticmethod
    def _watched(
        scope: Scope,
        given: Sequence[Tensor | None],
        made: Sequence[Tensor],
        with_parts: Tensor | None,
        body: Callable[..., None],
    ) -> Recording | None:
        launches: list[tuple[Program, Sequence[Tensor | Tile]]] = []
        scope.watched = launches
        watch = _Watch()
        try:
            with watch:
                body(*made)
        finally:
            scope.watched = None
        if not watch.only_launches:
            return None
        return _recording(watch, launches, given, made, with_parts, scope.device)
