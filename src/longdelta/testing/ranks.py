"""A pool of processes that are the ranks of process groups on this machine.

    with RankPool(4) as pool:
        results = pool.run(2, function, *args)        # function(group, *args) on two of them

Processes start once, on first use, and serve many runs. A function travels by name (and file, where
its module is not importable: a test file), arguments and results as bytes of torch.save. A failed
rank is an exception that names it; a rank that hangs or dies ends the run, and the next run starts
new processes.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from longdelta.distributed import collectives
from longdelta.distributed.collectives import Group


@dataclass(frozen=True)
class Failure:
    """What a rank raised, or why it did not answer: kind is "Died" or "Hung" then."""

    kind: str
    message: str
    trace: str = ""


class RankError(RuntimeError):
    """A rank failed; says which, and how."""


class RankPool:
    """Processes with one torch thread each; `backend` "gloo", or "nccl" with one GPU each.

    seconds: how long a run may take. message_seconds: the timeout of the groups.
    """

    def __init__(
        self,
        ranks: int,
        backend: str = "gloo",
        seconds: float = 120.0,
        message_seconds: float = 60.0,
    ) -> None:
        self.ranks, self.backend = ranks, backend
        self.seconds, self.message_seconds = seconds, message_seconds
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._store: Any = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(group, *args) on the first `ranks` processes; the results by rank.

        Raises:
            RankError: a rank raised, died or hung.
        """
        found = self.outcomes(ranks, function, *args)
        failed = [(rank, x) for rank, x in enumerate(found) if isinstance(x, Failure)]
        if failed:
            self.close()
            raise RankError(
                "\n".join(
                    f"rank {rank} of {ranks}: {x.kind}: {x.message}\n{x.trace}"
                    for rank, x in failed
                )
            )
        return found

    def outcomes(
        self,
        ranks: int,
        function: Callable[..., Any],
        *args: Any,
        message_seconds: float | None = None,
    ) -> list[Any]:
        """As `run`, with a `Failure` in place of a result.

        message_seconds: a group of its own with this timeout, so that faults stay in it.
        """
        if not 1 <= ranks <= self.ranks:
            raise ValueError(f"ranks must be in [1, {self.ranks}], got {ranks}")
        if not self._processes:
            self._start()
        call = _dump((_address(function), _dump(args)))
        for rank, pipe in enumerate(self._pipes):
            pipe.send((ranks, message_seconds, call if rank < ranks else b""))
        answers = self._collect(ranks)
        if any(answer is None for answer in answers):
            for rank, process in enumerate(self._processes[:ranks]):
                if answers[rank] is None:
                    answers[rank] = self._silent(process)
            self.close()
        return [_load(x) if isinstance(x, bytes) else x for x in answers]

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=1)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes, self._store = [], [], None

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._store = collectives.serve()
        for rank in range(self.ranks):
            here, there = spawn.Pipe()
            place = (self.backend, rank, self.ranks, self._store.port, self.message_seconds)
            process = spawn.Process(target=_serve, args=(there, *place), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def _collect(self, ranks: int) -> list[bytes | Failure | None]:
        """Each rank's answer; None from those that died or did not answer in time."""
        answers: list[bytes | Failure | None] = [None] * ranks
        open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes[:ranks])}
        end = time.monotonic() + self.seconds
        while open_pipes and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(open_pipes), timeout=left):
                assert isinstance(pipe, Connection)
                rank = open_pipes.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = None
        return answers

    def _silent(self, process: BaseProcess) -> Failure:
        process.join(timeout=0.5)
        if process.is_alive():
            return Failure("Hung", f"no answer after {self.seconds} s")
        return Failure("Died", f"exit code {process.exitcode}")


def _serve(
    pipe: Connection, backend: str, rank: int, ranks: int, port: int, seconds: float
) -> None:
    """One process of the pool: answers until the pipe closes."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    collectives.start(backend, rank, ranks, port, seconds)
    groups: dict[int, Group] = {}
    while True:
        try:
            members, own_seconds, call = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        # All processes of the pool make a new group together, members or not.
        if own_seconds is not None:
            group = collectives.new_group(range(members), own_seconds)
        else:
            if members not in groups:
                groups[members] = collectives.new_group(range(members), seconds)
            group = groups[members]
        if call:
            pipe.send(_answer(group, call))


def _answer(group: Group, call: bytes) -> bytes | Failure:
    try:
        address, args = _load(call)
        function = _find(*address)
        return _dump(function(group, *_load(args)))
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent raises it
        return Failure(type(error).__name__, str(error), traceback.format_exc())


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _dump(thing: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def _address(function: Callable[..., Any]) -> tuple[str, str, str]:
    return function.__module__, function.__code__.co_filename, function.__qualname__


def _find(module: str, file: str, name: str) -> Any:
    """The function: from its module, or from its file where that cannot be imported by name."""
    if module not in sys.modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            spec = importlib.util.spec_from_file_location(module, file)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module])
    return getattr(sys.modules[module], name)
