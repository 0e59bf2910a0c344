"""Launching compiled kernels: on the right device and stream, with what is known looked up.

Note [Launches]: Triton's own launch looks at every argument, builds a key of strings, binds names
and encodes descriptors anew. What a plan settles (grid, counts, tables, constants) is resolved once
instead, into a `Program` that is kept with the plan. Of the arguments that move from call to call
only dtypes and 16-byte alignment may change the machine code: they lead to the compiled kernel, and
one call into the driver is left. A new plan finds the kernel in a table of the process.

Note [Scopes]: a body (a forward, a backward) runs in one `Scope`, which makes its device current
and holds its records. Scopes nest and belong to a thread, as autograd runs a backward on its own.
The stream is asked for at every launch, which costs less than to find out whether it was switched.

Note [Tables]: a plan that is forgotten frees its tables while launches that read them may wait.
torch hands the memory out again in the order of the stream it was asked for on; other streams that
read it are made known to torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from longdelta.runtime import toolchain
from longdelta.runtime.driver import Call, Tile, call_of, encode


@dataclass(frozen=True)
class Launch:
    """`count` launches in a row of one kernel, each of `grid` programs, in a "forward" or a
    "backward"."""

    phase: str
    program: str
    grid: int
    count: int


class _Thread(threading.local):
    scope: Scope | None = None


_thread = _Thread()
_last: dict[str, list[tuple[str, int]]] = {}
_compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
_captured: set[object] = set()
"""Plans and programs of captured graphs: a replay reads their tables, however long ago it was."""
_compiling = threading.RLock()
_fresh = 0
"""How many `fresh` blocks are being run, on all threads."""
_KEPT = 64
OPTIONS = {"launch_pdl": True}
"""Of every launch: a kernel starts while the one before it ends; `follow` (dialect.py) waits."""


def records() -> tuple[Launch, ...]:
    """What the last forward and the last backward of this process launched.

    Returns:
        ``(Launch(phase, program, grid, count), ...)``, in order, the forward first. The eager
        backend launches nothing.
    Source: this project.
    """
    return tuple(
        Launch(phase, program, grid, len(list(same)))
        for phase in sorted(_last, reverse=True)
        for (program, grid), same in groupby(_last[phase])
    )


def forget_records() -> None:
    """Empties `records`.

    Source: this project.
    """
    _last.clear()


@contextmanager
def fresh() -> Iterator[None]:
    """Inside it, on every thread, all that Note [Launches] keeps is resolved anew, by Triton.

    The bits are the same, each launch takes longer: a way to find out whether what is kept is at
    fault.
    Source: this project.
    """
    global _fresh
    with _compiling:
        _fresh += 1
    try:
        yield
    finally:
        with _compiling:
            _fresh -= 1


def is_fresh() -> bool:
    """Whether some thread is inside `fresh`."""
    return bool(_fresh)


def _on(device: torch.device) -> Any:
    """A context that makes this device the current one; None where it is that already."""
    return None if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def _stream(device: torch.device) -> int:
    """The driver's name of the current stream."""
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def _read_here(table: Tensor) -> None:
    """Its memory is not handed out again before what the current stream has been given is done."""
    if table.is_cuda:
        table.record_stream(torch.cuda.current_stream(table.device))


def _capturing() -> bool:
    """Whether the current stream is being captured into a graph."""
    return torch.cuda.is_current_stream_capturing()


class Scope:
    """One body on one device: Note [Scopes].

    phase: under which `records` has it, if under any. plan: kept for good if a graph is captured.
    """

    __slots__ = (
        "_guard",
        "_outer",
        "captured",
        "device",
        "launched",
        "phase",
        "plan",
        "watched",
    )

    def __init__(self, phase: str | None, device: torch.device, plan: object | None = None) -> None:
        self.phase = phase
        self.device = device
        self.plan = plan
        self.launched: list[tuple[str, int]] = []
        self.watched: list[tuple[Program, Sequence[Tensor | Tile]]] | None = None
        """What is launched, with its arguments, while somebody wants to know (recording.py)."""

    def __enter__(self) -> Scope:
        on_gpu = self.device.type == "cuda"
        self._guard = _on(self.device) if on_gpu else None
        if self._guard is not None:
            self._guard.__enter__()
        self.captured = on_gpu and _capturing()
        if self.captured:
            _captured.add(self.plan)
        self._outer, _thread.scope = _thread.scope, self
        if self._outer is not None:
            self.watched = self._outer.watched
        return self

    def __exit__(self, *error: object) -> None:
        _thread.scope = self._outer
        if self._guard is not None:
            self._guard.__exit__(*error)
        if self.phase is not None:
            _last[self.phase] = self.launched


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


IN_TURN = 32
"""Chunks of walks that differ so little that programs take them in turn."""


def programs(walks: int, longest: int, device: torch.device) -> int:
    """Programs of a stage that walks: one each, or one per SM that takes many short ones in turn,
    where the loads of the next overlap the end of the last."""
    return min(walks, multiprocessors(device)) if longest <= IN_TURN else walks


def _kind(argument: Any, any_value: bool = False) -> tuple[Any, ...]:
    """What the machine code may depend on. any_value: of an integer, whether it is a long one."""
    if isinstance(argument, Tensor):
        return argument.dtype, not argument.data_ptr() & 15
    if isinstance(argument, int):
        wide = not -(2**31) <= argument < 2**31
        return (wide,) if any_value else (wide, argument == 1, argument % 16 == 0)
    return (type(argument),)


class Program:
    """A kernel with all that a plan settles: Note [Launches].

    grid: how many programs. settled: the kernel's last arguments before its constants. constants:
    its constexpr arguments, which come last, and options. Called with the arguments that come
    first: tensors, and tiles, of which one place always has one dtype, box and layout.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int,
        device: torch.device,
        *settled: Any,
        num_warps: int = 4,
        **constants: Any,
    ) -> None:
        if device == torch.device("cuda"):  # without an index: the one that is current
            device = torch.device("cuda", torch.cuda.current_device())
        self._kernel, self._grid, self.device, self._settled = kernel, grid, device, settled
        self._options = {**OPTIONS, "num_warps": num_warps, **constants}
        names = [name for name in kernel.arg_names if name not in constants]
        named = zip(names[len(names) - len(settled) :], settled, strict=True)
        kinds = (_kind(x, name in kernel.do_not_specialize) for name, x in named)
        self._key = (id(kernel), device, *self._options.items(), *kinds)
        self._record = (kernel.__name__, grid)
        self._calls: dict[Hashable, Call] = {}
        self._how: Sequence[Any] = ()
        """What the compiler noted of each tile."""
        self._streams: set[int] = set()
        """That have read the tables: Note [Tables]."""

    def __call__(self, *moving: Tensor | Tile) -> None:
        """Launches it on its device, on the stream that is current there for this thread."""
        if not self._grid:
            return
        scope = _thread.scope
        if scope is None or scope.device != self.device:
            with Scope(None, self.device):
                self(*moving)
            return
        if scope.watched is not None:
            scope.watched.append((self, moving))
        stream = self._enter(scope)
        if _fresh:
            self._by_triton(moving)
        elif not self._as_before(stream, moving):
            self._first(stream, moving)

    def _enter(self, scope: Scope) -> int:
        """Notes a launch in its scope, and what has to outlive it; the stream that it goes to."""
        scope.launched.append(self._record)
        stream = _stream(self.device)
        if scope.captured:
            _captured.add(self)
        elif stream not in self._streams:
            self._streams.add(stream)
            for x in self._settled:
                if isinstance(x, Tensor):
                    _read_here(x)
        return stream

    def _as_before(self, stream: int, moving: Sequence[Tensor | Tile]) -> bool:
        """Launches what is known for arguments of these kinds; False where nothing is."""
        words: list[Any] = []
        kinds: list[Hashable] = []
        tiles = 0
        for x in moving:
            if type(x) is Tile:
                words += (x.words or encode(x, self._how[tiles])) if self._how else [x]
                tiles += 1
            else:
                address = x.data_ptr()
                words.append(address)
                kinds += (x.dtype, not address & 15)
        call = self._calls.get(tuple(kinds))
        if call is None:
            return False
        call(self._grid, stream, words)
        return True

    def known(self, moving: Sequence[Tensor | Tile]) -> tuple[Call | None, Sequence[Any]]:
        """How arguments of these kinds are launched, and what the compiler noted of each tile."""
        kinds = tuple(y for x in moving if not isinstance(x, Tile) for y in _kind(x))
        return self._calls.get(kinds), self._how

    def again(self, scope: Scope, call: Call, words: list[Any]) -> None:
        """Launches a known call."""
        call(self._grid, self._enter(scope), words)

    def _by_triton(self, moving: Sequence[Tensor | Tile]) -> Any:
        """Launches it as Triton does; returns the compiled kernel."""
        first = [x.descriptor() if isinstance(x, Tile) else x for x in moving]
        with _compiling, toolchain.compiling():
            return self._kernel[(self._grid,)](*first, *self._settled, **self._options)

    def _first(self, stream: int, moving: Sequence[Tensor | Tile]) -> None:
        """Launches it for the first time with these kinds, which another plan may have met."""
        kinds = tuple(y for x in moving if not isinstance(x, Tile) for y in _kind(x))
        key = (self._key, kinds)
        with _compiling:
            known = _compiled.get(key)
            if known is None:
                compiled = self._by_triton(moving)
                names = self._kernel.arg_names[len(moving) + len(self._settled) :]
                _compiled[key] = compiled, tuple(self._options[name] for name in names)
        compiled, constants = _compiled[key]
        rest = [x.data_ptr() if isinstance(x, Tensor) else x for x in self._settled]
        self._calls[kinds], encoded = call_of(compiled, (*rest, *constants))
        self._how = (getattr(compiled.metadata, "tensordesc_meta", None) or ()) if encoded else ()
        if known is not None:
            self._as_before(stream, moving)


class Plan:
    """Settles what programs are resolved from, and keeps them."""

    def __init__(self) -> None:
        self.programs: dict[Hashable, Program] = {}


def resolved(plan: Plan, make: Callable[..., Program], *scalars: Hashable) -> Program:
    """make(plan, *scalars), once for a plan; it may read nothing else."""
    if _fresh:
        return make(plan, *scalars)
    key = (make, *scalars)
    program = plan.programs.get(key)
    if program is None:
        if len(plan.programs) >= _KEPT:
            plan.programs.clear()
        program = plan.programs[key] = make(plan, *scalars)
    return program
