"""Every variant of every kernel for sm_90a, compiled without a GPU, and what came out.

`python -m longdelta.kernels.gluon.compile` prints it as JSON, for a Triton other than this
process's; `longdelta doctor --compile` as a table.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.experimental.gluon._runtime import GluonASTSource

from longdelta.kernels.gluon.activate import VARIANTS as ACTIVATE
from longdelta.kernels.gluon.adjoint_activate import VARIANTS as ADJOINT_ACTIVATE
from longdelta.kernels.gluon.adjoint_scan import VARIANTS as ADJOINT_SCAN
from longdelta.kernels.gluon.adjoint_summarize import VARIANTS as ADJOINT_SUMMARIZE
from longdelta.kernels.gluon.fold import VARIANTS as FOLD
from longdelta.kernels.gluon.gradients import VARIANTS as GRADIENTS
from longdelta.kernels.gluon.machine_code import disassembled, late_loads
from longdelta.kernels.gluon.prepare import VARIANTS as PREPARE
from longdelta.kernels.gluon.scan import VARIANTS as SCAN
from longdelta.kernels.gluon.summarize import VARIANTS as SUMMARIZE
from longdelta.kernels.gluon.variants import TYPES, Variant
from longdelta.runtime import toolchain
from longdelta.runtime.launch import OPTIONS

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
"""What a program can have."""
_WORKERS = 8
"""Processes that compile ahead; each takes a few hundred MB, and each rank may have its own."""
# Whatever takes longest to compile comes first.
FORWARD: tuple[Variant, ...] = (*PREPARE, *SCAN, *SUMMARIZE, *FOLD, *ACTIVATE)
BACKWARD: tuple[Variant, ...] = (
    *GRADIENTS,
    *ADJOINT_SCAN,
    *ADJOINT_SUMMARIZE,
    *ADJOINT_ACTIVATE,
)
VARIANTS = (*FORWARD, *BACKWARD)


@dataclass(frozen=True)
class Report:
    """What a variant became; nothing but the failure, where it could not be compiled."""

    name: str
    seconds: float
    failure: str = ""
    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    code_bytes: int = 0
    products: int = 0
    serialised: int = 0
    """Warnings of ptxas that it puts wgmma instructions one after another (C7510, C7512)."""
    follows: bool = False
    """Whether it waits for the kernel before it before it reads or writes anything."""
    late: int = 0
    """Loads under way where a buffer is handed back: machine_code.py, Note [Handing back]."""
    late_products: int = 0
    """Those of them that a product of registers waits for."""

    def faults(self, variant: Variant) -> list[str]:
        """What is not as the variant must be."""
        if self.failure:
            return [self.failure]
        limits = (
            (self.follows, "does not `follow` the kernel before it"),
            (self.serialised == 0, f"{self.serialised} warnings of serialised products"),
            (self.spilled_bytes <= variant.spills, f"spills {self.spilled_bytes} bytes"),
            (self.shared_bytes <= SHARED_BYTES, f"{self.shared_bytes} bytes of shared memory"),
            (
                self.products == variant.products,
                f"{self.products} wgmma instead of {variant.products}",
            ),
            (
                not (self.late_products if variant.others_handed_back else self.late),
                f"may be reading a buffer that it hands back, by {self.late} loads",
            ),
        )
        return [fault for holds, fault in limits if not holds]


def source(variant: Variant) -> GluonASTSource:
    """The variant as Triton's compiler takes it; the kernel itself names its arguments."""
    names = variant.kernel.arg_names
    missing = [n for n in names if n not in {*TYPES, *variant.types, *variant.constants}]
    assert not missing, f"{variant.name}: no type for {missing}; see TYPES in variants.py"
    types = {
        n: "constexpr" if n in variant.constants else (variant.types.get(n) or TYPES[n])
        for n in names
    }
    aligned = [n for n, t in types.items() if t.startswith("*") or t.endswith(":16")]
    return GluonASTSource(
        variant.kernel,
        {n: t.removesuffix(":16") for n, t in types.items()},
        {(names.index(n),): value for n, value in variant.constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )


def _compiled(variant: Variant) -> Any:
    return triton.compile(source(variant), target=HOPPER, options={**OPTIONS, **variant.options})


def code_bytes(cubin: bytes) -> int:
    """Size of the .text sections of an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    return sum(h[5] for h in headers if cubin.startswith(b".text", names + h[0]))


def _reason(error: BaseException) -> str:
    """Of an error in a kernel: the last line of what lies at its root."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def report(variant: Variant) -> Report:
    """Compiles the variant afresh, with the ptxas that a launch would take."""
    said, start = io.StringIO(), time.perf_counter()
    with toolchain.compiling(), knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        try:
            with contextlib.redirect_stdout(said):
                made = _compiled(variant)
        except (TritonError, RuntimeError) as error:
            seconds = time.perf_counter() - start
            return Report(variant.name, seconds, f"does not compile: {_reason(error)}")
    seconds, log = time.perf_counter() - start, said.getvalue()
    try:
        late = late_loads(disassembled(made.asm["cubin"]))
    except (OSError, subprocess.SubprocessError) as error:
        return Report(variant.name, seconds, f"cannot be disassembled: {error}")
    return Report(
        variant.name,
        seconds,
        registers=int(re.findall(r"Used (\d+) registers", log)[-1]),
        spilled_bytes=int(re.findall(r"(\d+) bytes spill stores", log)[-1]),
        shared_bytes=made.metadata.shared,
        code_bytes=code_bytes(made.asm["cubin"]),
        products=made.asm["ptx"].count("wgmma.mma_async"),
        serialised=len(re.findall(r"C75(?:10|12)", log)),
        follows=_follows(made.asm["ptx"]),
        late=late.any,
        late_products=late.products,
    )


def _follows(ptx: str) -> bool:
    """Whether `follow` comes before the first access of global memory, in the text."""
    accesses = re.search(r"\b(?:ld|st|red|atom|prefetch)\.global|\bcp\.async|\btensormap", ptx)
    before = ptx[: accesses.start() if accesses else len(ptx)]
    return 0 <= before.find("griddepcontrol.wait") < before.find("griddepcontrol.launch_dependents")


class Ahead:
    """Variants on their way into Triton's cache, in processes side by side, the forward's first.

    One after another, as they are launched, they take half a minute, and threads of one process
    hold each other up (decision 0018). What fails here is left to its launch, which says why.
    """

    def __init__(self) -> None:
        parts = {"forward": FORWARD, "backward": BACKWARD}
        self._left = {part: len(variants) for part, variants in parts.items()}
        self._waiting = deque((part, v.name) for part, variants in parts.items() for v in variants)
        self._changed = threading.Condition()
        can = bool(sys.executable) and not getattr(sys, "frozen", False)
        self._workers = min(len(os.sched_getaffinity(0)), _WORKERS) if can else 0
        for _ in range(self._workers):
            threading.Thread(target=self._keep_busy, daemon=True).start()

    def wait(self, part: str) -> None:
        """Until all of a "forward" or a "backward" is there, or nobody is left to compile it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left[part] or not self._workers)

    def _next(self) -> tuple[str, str] | None:
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def _keep_busy(self) -> None:
        """One worker, as long as it answers; the last one's name goes back where it does not."""
        try:
            with contextlib.suppress(OSError), _worker() as worker:
                while (named := self._next()) is not None:
                    if not _compiled_by(worker, named[1]):
                        self._waiting.appendleft(named)
                        break
                    with self._changed:
                        self._left[named[0]] -= 1
                        self._changed.notify_all()
        finally:
            with self._changed:
                self._workers -= 1
                self._changed.notify_all()


def _worker() -> Any:
    """A process that compiles what it is told, with the modules of this one."""
    start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; "
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", f"{start}serve({str(knobs.cache.dir)!r})"],
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _compiled_by(worker: Any, name: str) -> bool:
    """Whether the worker has done what it can."""
    try:
        worker.stdin.write(name + "\n")
        worker.stdin.flush()
        return bool(worker.stdout.readline() == f"{name}\n")
    except OSError:
        return False


_started: dict[int, Ahead] = {}
"""By process: a child has none of its parent's threads."""


def ahead() -> Ahead:
    """What brings the variants into Triton's cache, where launches find them; begins with the first
    call of this process."""
    process = os.getpid()
    if process not in _started:
        _started[process] = Ahead()
    return _started[process]


def serve(folder: str) -> None:
    """Compiles the variants that are named, line by line, into a folder as Triton's cache; answers
    each with its name, and says nothing else."""
    knobs.cache.dir = folder
    named = {variant.name: variant for variant in VARIANTS}
    answers = sys.stdout
    with toolchain.compiling(), contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            with contextlib.suppress(TritonError, RuntimeError):
                _compiled(named[line.rstrip("\n")])
            answers.write(line)
            answers.flush()


def reports() -> Iterator[tuple[Variant, Report]]:
    """Of every variant, as it is compiled."""
    for variant in VARIANTS:
        yield variant, report(variant)


def main() -> None:
    """One line of JSON per variant: its report, and what is wrong with it."""
    for variant, found in reports():
        line: dict[str, Any] = asdict(found) | {"faults": found.faults(variant)}
        line["triton"] = toolchain.triton_version()
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
