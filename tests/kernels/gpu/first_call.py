"""The first training step of a process whose caches are empty: what is compiled, and when."""

import sys
import time

import torch
from triton import knobs

from longdelta.kernels.gluon import compile
from longdelta.ops import self_test
from longdelta.testing.workloads import Machine, Workload

compiled: list[str] = []
"""By launches: they found no code in the cache."""


def note(*, src, cache_hit, **_) -> None:
    if not cache_hit:
        compiled.append(src.name)


def main() -> None:
    knobs.cache.dir = sys.argv[1]
    knobs.compilation.listener = note
    torch.zeros(1, device="cuda")
    parts = []

    def time_it(owner, name) -> None:
        run = getattr(owner, name)

        def timed(*arguments, **options):
            start = time.perf_counter()
            result = run(*arguments, **options)
            parts.append(f"{name} {time.perf_counter() - start:.1f} s")
            return result

        setattr(owner, name, timed)

    time_it(compile.Ahead, "wait")
    time_it(self_test, "errors")
    start = time.perf_counter()
    Machine("gluon", "cuda").run(Workload(lengths=(1500, 700)), torch.bfloat16)
    torch.cuda.synchronize()
    sys.stdout.write(f"{time.perf_counter() - start:.1f} s, of which {parts}\n")
    assert not compiled, compiled


if __name__ == "__main__":
    main()
