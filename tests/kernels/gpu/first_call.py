"""The first training step of a process whose caches are empty: what is compiled, and when."""

import sys
import time

import torch
from triton import knobs

from longdelta.kernels.gluon.compile import VARIANTS
from longdelta.ops import self_test
from longdelta.testing.workloads import Machine, Workload

compiled: list[str] = []
ahead: list[int] = []
"""How many there were before the first launch."""


def note(*, src, cache_hit, **_) -> None:
    if not cache_hit:
        compiled.append(src.name)


def main() -> None:
    knobs.cache.dir = sys.argv[1]
    knobs.compilation.listener = note
    torch.zeros(1, device="cuda")
    errors = self_test.errors

    def tested(*arguments):
        ahead.append(len(compiled))
        return errors(*arguments)

    self_test.errors = tested
    start = time.perf_counter()
    Machine("gluon", "cuda").run(Workload(lengths=(1500, 700)), torch.bfloat16)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    sys.stdout.write(f"{seconds:.1f} s, {len(compiled)} kernels compiled\n")
    assert len(compiled) == len(VARIANTS), compiled
    assert ahead == [len(VARIANTS)]


if __name__ == "__main__":
    main()
