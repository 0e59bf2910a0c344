"""The Hopper kernels against the eager stages, once per GPU and toolchain, before they are used.

Note [Self-test]: a compiler can be wrong where our tests did not run (runtime/toolchain.py, Note
[ptxas]). So the first forward in a process runs a small problem through the forward of both
backends, the first backward through both of both; each waits for its kernels to be compiled. A pass
is kept on disk, in Triton's cache, under the GPU, the versions and the kernels' text; a failure is
not, and the next process tries again. It runs in a thread of its own, where no tracing, autocast,
inference mode or transform of the caller reaches it. A first call inside the capture of a CUDA
graph, which allows no test, goes untested.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from longdelta.errors import UnsupportedProblem
from longdelta.kernels import eager
from longdelta.kernels.stages import Activation, Backend, Tables
from longdelta.ops.backward import Cotangents, Gradients, backward
from longdelta.ops.boundary import Segments
from longdelta.ops.forward import Machine, Operands, forward
from longdelta.plan.chunks import walk
from longdelta.plan.tensors import KEPT, saved_bytes
from longdelta.runtime import toolchain

OPT_OUT = "LONGDELTA_SELF_TEST"
"""Environment variable: 0 leaves the test out."""
BUDGET = 5e-2
"""Relative L2 error. Right kernels stay below 8e-3; what a compiler breaks is far off, or NaN."""
COMPARED = {
    "forward": ("S_border", "M", "o", "final_state"),
    "backward": ("dq", "dk", "dv", "dg", "dbeta", "d_initial_state", "dA_log", "ddt_bias"),
}
"""Of each part, what is compared."""
_OFFSETS = (0, 1100, 1100, 1170)
"""Three segments, a ragged tail, a document without tokens."""
_H, _HV, _D = 2, 6, 128

_faults: dict[tuple[torch.device, str], str | None] = {}
_one_at_a_time = threading.Lock()


def fault(device: torch.device, part: str = "forward") -> str | None:
    """Why the Hopper kernels of a part are not to be used on this GPU; None where they are."""
    if (device, part) not in _faults:
        # The only environment variable: whoever is locked out by a test may not own the code.
        if os.getenv(OPT_OUT) == "0":  # noqa: TID251
            _faults[device, part] = None
        elif torch.cuda.is_current_stream_capturing():
            return None
        else:
            with _one_at_a_time:
                if (device, part) not in _faults:
                    _faults[device, part] = _remembered(device, part)
    return _faults[device, part]


def is_settled(device: torch.device) -> bool:
    """Whether `fault` knows of the forward; not after a call inside a capture alone."""
    return device.type != "cuda" or (device, "forward") in _faults


def require_backward(device: torch.device) -> None:
    """Raises where the backward's kernels are not to be used: the forward has run, so that no other
    backend can take over."""
    reason = fault(device, "backward")
    if reason is not None:
        raise UnsupportedProblem(f"the backward of gluon {reason}. Or use backend='eager'")


def _remembered(device: torch.device, part: str) -> str | None:
    """The test's result, from disk where it has passed before."""
    what = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__}
    try:
        what |= toolchain.described()
    except OSError as error:
        return f"needs a ptxas that runs; asked for its version, it gave {error}"
    key = hashlib.sha256(json.dumps([what, _text_of_package()]).encode()).hexdigest()
    passed = toolchain.cache_folder() / f"longdelta-self-test-{key[:16]}-{part}.json"
    with suppress(OSError):  # Where the folder cannot be read, every process tests.
        if passed.exists():
            return None
    from longdelta.kernels import gluon
    from longdelta.kernels.gluon.compile import ahead

    def test() -> dict[str, float]:
        compiling = ahead()
        with torch.cuda.device(device), _deterministic_or_not():
            return errors(
                "gluon", cast(Backend, gluon), device, part, ready=partial(compiling.wait, part)
            )

    found = judged(test)
    if found is not None:
        return (
            f"failed its self-test with {', '.join(f'{n} {v}' for n, v in what.items())}: {found}. "
            f"Try the extra longdelta[ptxas] or another Triton; {OPT_OUT}=0 leaves the test out"
        )
    try:
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.write_text(json.dumps(what))
    except OSError:
        pass  # It is then repeated by every process.
    return None


@contextmanager
def _deterministic_or_not() -> Iterator[None]:
    """Without `use_deterministic_algorithms`, under which the eager stages ask cuBLAS for what the
    process may not have set up."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)


def _text_of_package() -> list[str]:
    folder = Path(__file__).parents[1]
    return [path.read_text() for path in sorted(folder.rglob("*.py"))]


def judged(test: Callable[[], dict[str, float]]) -> str | None:
    """What is wrong according to a test, run in a thread of its own; None where nothing is.

    Memory that does not suffice says nothing of a compiler: that error is the caller's.
    """
    try:
        with ThreadPoolExecutor(1) as fresh:
            found = fresh.submit(test).result()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  a compiler fails in many ways
        return f"{type(error).__name__}: {error}".splitlines()[0]
    # Written so that NaN is wrong.
    wrong = [f"{name} {error:.1e}" for name, error in found.items() if not error <= BUDGET]
    return f"relative errors of {', '.join(wrong)}" if wrong else None


def errors(
    name: str,
    backend: Backend,
    device: torch.device,
    part: str,
    ready: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Relative L2 errors against the eager backend's of outputs and states at borders, or of the
    gradients.

    name: of the backend, for the dtypes of the tensors between its stages. ready: waits until its
    kernels are compiled; the eager backend works meanwhile.
    """
    operands, cotangents = _problem(device)
    tables = Tables(walk(_OFFSETS, _HV), operands.q.device)
    reference = _run(Machine("eager", eager, tables, Segments()), operands, cotangents, part)
    ready()
    ours = _run(Machine(name, backend, tables, Segments()), operands, cotangents, part)
    return {n: _relative(ours[n].double(), reference[n].double()) for n in COMPARED[part]}


def _relative(x: Tensor, reference: Tensor) -> float:
    return float((x - reference).norm() / reference.norm())


def _problem(device: torch.device) -> tuple[Operands, Cotangents]:
    """Raw inputs, so that activations are part of it; gates that keep most of a state, but in the
    last head, where segments forget."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(device, dtype)

    T, N, half = _OFFSETS[-1], len(_OFFSETS) - 1, torch.bfloat16
    operands = Operands(
        q=normal(T, _H, _D, dtype=half),
        k=normal(T, _H, _D, dtype=half),
        v=normal(T, _HV, _D, dtype=half),
        g=normal(T, _HV, dtype=half) - torch.tensor([6.0] * 5 + [-1.0], device=device, dtype=half),
        beta=normal(T, _HV, dtype=half),
        A_log=normal(_HV),
        dt_bias=normal(_HV),
        initial_state=normal(N, _HV, _D, _D),
        activation=Activation(qk_l2norm=True, gate=True, beta_sigmoid=True, neg_eigval=False),
        scale=_D**-0.5,
    )
    return operands, Cotangents(normal(T, _HV, _D, dtype=half), normal(N, _HV, _D, _D))


def _run(
    machine: Machine, operands: Operands, cotangents: Cotangents, part: str
) -> dict[str, Tensor]:
    """A forward, and a backward where that is asked for; every buffer is full of NaN before."""
    sizes = operands.sizes(machine.tables, machine.name)
    size = saved_bytes("light", sizes.counts, HV=_HV, K=_D, V=_D, backend=machine.name)
    saved = torch.full((size,), 255, dtype=torch.uint8, device=operands.q.device)
    o = torch.full_like(operands.v, float("nan"))
    assert operands.initial_state is not None
    final_state = torch.full_like(operands.initial_state, float("nan"))
    forward(operands, machine, save="light", saved=saved, o=o, final_state=final_state)
    if part == "forward":
        return sizes.views(KEPT["light"], saved) | {"o": o, "final_state": final_state}
    x = operands
    raw = (x.q, x.k, x.v, x.g, x.beta, x.initial_state, x.A_log, x.dt_bias)
    places = [torch.full_like(y, float("nan")) for y in raw if y is not None]
    found = Gradients(**dict(zip(COMPARED["backward"], places, strict=True)))
    backward(operands, cotangents, machine, save="light", saved=saved, found=found)
    return vars(found)
