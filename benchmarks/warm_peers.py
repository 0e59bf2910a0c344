"""Compiles and tunes what a benchmark's rows need, on all cores at once, and packs the caches.

A peer compiles for one to three minutes per (q/k heads, value heads); a benchmark does it arm after
arm. Here each arm has a process of its own for every pair of heads (FlashQLA for every row). The
caches can go with a later run to a machine that has none; they hold absolute paths, so they must
lie where they lay:

    python benchmarks/warm_peers.py --rows 2x8_64k_1doc_model --cache /tmp/warm --pack warm
    cat warm/caches.tar.xz.* | tar -xJ -C /tmp/warm
    TRITON_CACHE_DIR=/tmp/warm/triton TILELANG_CACHE_DIR=/tmp/warm/tilelang longdelta bench ...

FLA's tuning is Triton's and is kept in Triton's cache. Only one process at a time tunes on a GPU
(the compilation before it is free), so the others do not disturb its measurements.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from longdelta.bench.baselines import (
    Arm,
    all_arms,
    chosen_arms,
    cotangent,
    release,
    whole_inputs,
)
from longdelta.bench.contest import Entry, launch_module, operation
from longdelta.bench.problem import Place, problem_of
from longdelta.bench.rows import Row, chosen_rows, suite_named
from longdelta.bench.run import place_here
from longdelta.distributed import collectives
from longdelta.errors import InvalidInput

PART_BYTES = 15 << 20
"""Of one file of the pack: many places that keep files take no larger ones."""


@dataclass
class Job:
    """One arm on one row, in its own processes."""

    arm: Arm
    row: Row
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.arm.name}-{self.row.name}"


def jobs_of(rows: Sequence[Row], arms: Sequence[Arm]) -> list[Job]:
    """FlashQLA compiles longest, and other kernels for other documents: first, and row by row. The
    other arms compile the same for every row of a pair: peers tune on its first, ours takes the
    smallest."""
    pairs: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        pairs.setdefault((row.H, row.HV), []).append(row)
    jobs = []
    for arm in arms:
        for held in pairs.values():
            needed = held[:1]
            if arm.family:
                needed = [min(held, key=lambda row: row.tokens)]
            elif arm.module == "flash_qla":
                needed = held
            jobs += [Job(arm, row) for row in needed if not arm.missing()]
    return sorted(jobs, key=lambda job: job.arm.module != "flash_qla")


def start(job: Job, options: argparse.Namespace, port: int) -> None:
    folder = options.cache
    command = [
        "env",
        f"TRITON_CACHE_DIR={folder / 'triton'}",
        f"TILELANG_CACHE_DIR={folder / 'tilelang'}",
        "OMP_NUM_THREADS=1",
        sys.executable,
    ]
    if options.ranks > 1:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={options.ranks}"]
        command += [f"--master-port={port}"]
    command += [__file__, "--cache", str(folder), "--suite", options.suite]
    command += ["--arms", job.arm.name, "--rows", job.row.name, "--worker", "--op", options.op]
    with (folder / "logs" / f"{job.name}.log").open("wb") as log:
        job.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    job.began = time.monotonic()


def stop(job: Job) -> None:
    assert job.process is not None
    with contextlib.suppress(ProcessLookupError):
        # Its own session, which this started: the worker and the compilers that it runs.
        job.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.process.wait(3)
    subprocess.run(["kill", "-KILL", "--", f"-{job.process.pid}"], check=False, capture_output=True)
    job.process.wait()


def run_all(jobs: list[Job], options: argparse.Namespace) -> bool:
    """Starts as many jobs as `--processes` allows; whether all ended well in time."""
    deadline = time.monotonic() + options.seconds
    waiting, running, well = list(jobs), [], True
    try:
        while waiting or running:
            while waiting and len(running) < options.processes:
                job = waiting.pop(0)
                start(job, options, 29600 + len(waiting))
                running.append(job)
            time.sleep(0.5)
            late = time.monotonic() > deadline
            for job in [job for job in running if late or job.process.poll() is not None]:
                running.remove(job)
                seconds = time.monotonic() - job.began
                if job.process.poll() is None:
                    stop(job)
                    how = "stopped: out of time"
                else:
                    how = (
                        "ok"
                        if job.process.returncode == 0
                        else f"failed: {last_line(job, options)}"
                    )
                well = well and how == "ok"
                print(f"{seconds:6.1f} s  {job.name}: {how}", flush=True)
            if late:
                for job in waiting:
                    print(f"{job.name}: not started", flush=True)
                return False
    finally:  # An interrupt leaves no worker on the GPU.
        for job in running:
            stop(job)
    return well


def last_line(job: Job, options: argparse.Namespace) -> str:
    text = (options.cache / "logs" / f"{job.name}.log").read_text(errors="replace").strip()
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    return (errors or text.splitlines() or [""])[-1][:200]


@contextlib.contextmanager
def alone(file: Path) -> Iterator[None]:
    """One process at a time."""
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def tune_alone(lock: Path) -> None:
    """Triton's tuning compiles and runs each candidate once before it waits for the GPU."""
    from triton.backends.nvidia.driver import CudaDriver
    from triton.testing import do_bench

    def measure(call: Callable[[], Any], **options: Any) -> Any:
        call()
        torch.cuda.synchronize()
        with alone(lock):
            return do_bench(call, **options)

    CudaDriver.get_benchmarker = lambda self: measure


def forget_kernels() -> None:
    """The next launches look into the cache on disk, as those of a new process do."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    for each in gc.get_objects():
        if issubclass(type(each), Autotuner):
            each.cache.clear()
        elif issubclass(type(each), JITFunction):
            each.device_caches.clear()


def note_used(log: TextIO) -> None:
    """Writes down which entries of Triton's cache are read; those that tuning rejected are not."""
    from triton.runtime.cache import FileCacheManager

    for name in ("get_file", "get_group"):
        read = getattr(FileCacheManager, name)

        def noted(self: Any, filename: str, read: Any = read) -> Any:
            found = read(self, filename)
            if found:
                log.write(f"{self.key}\n")
            return found

        setattr(FileCacheManager, name, noted)


def worker(arm: Arm, row: Row, op: str, folder: Path) -> int:
    """Runs the arm on its row, then once more from the cache on disk."""
    place = place_here()
    tune_alone(folder / f"gpu{place.device.index or 0}.lock")
    try:
        with (folder / "used" / f"{arm.name}-{row.name}-{place.rank}").open("w") as log:
            run_once(arm, row, op, place)
            forget_kernels()
            note_used(log)
            # This package keeps resolved launches of its own.
            launches = launch_module(arm.family)
            with contextlib.nullcontext() if launches is None else launches.fresh():
                run_once(arm, row, op, place)
    except Exception as error:  # noqa: BLE001  a peer may raise anything
        traceback.print_exc()
        print(f"error: {type(error).__name__}: {error}".replace("\n", " "))
        return 1
    finally:
        collectives.leave(place.group)
    return 0


def run_once(arm: Arm, row: Row, op: str, place: Place) -> None:
    began = time.monotonic()
    problem = problem_of(row, place)
    entry = Entry(arm, arm.build(problem))
    assert entry.runner is not None
    entry.leaves = whole_inputs(problem, entry.runner)
    entry.do = cotangent(problem, entry.runner)
    release(place.device)  # The other processes run on this GPU, too.
    operation(entry, op)()
    if place.device.type == "cuda":
        torch.cuda.synchronize()
    print(f"{op}: {time.monotonic() - began:.1f} s", flush=True)


def pack(folder: Path, target: Path, complete: bool) -> None:
    """What a later run reads: machine code with its description, and TileLang's entries.

    Of Triton's cache only what was used, unless a job did not get as far as saying what that is.
    What was used goes along, so that a pack of an unpacked cache keeps what is not used again.
    """
    target.mkdir(parents=True, exist_ok=True)
    used = {key for log in (folder / "used").iterdir() for key in log.read_text().split()}
    files = [
        path
        for path in sorted((folder / "triton").glob("*/*"))
        if path.suffix == ".so"
        or (path.suffix in (".cubin", ".json") and (path.parent.name in used or not complete))
    ]
    files += sorted((folder / "triton").glob("*.json"))
    files += sorted((folder / "used").iterdir())
    # Beside the kernels lie copies of their binaries for other hosts, and unfinished entries.
    files += sorted(folder.glob("tilelang/*/*/kernels/*/*"))
    names = "".join(f"{path.relative_to(folder)}\n" for path in files)
    (folder / "names.txt").write_text(names)
    size = sum(path.stat().st_size for path in files)
    for stale in target.glob("caches.tar.xz.*"):
        stale.unlink()
    line = (
        f"set -o pipefail; tar -C '{folder}' -cf - -T '{folder}/names.txt' | xz -T0 -6 "
        f"| split -b {PART_BYTES} - '{target}/caches.tar.xz.'"
    )
    subprocess.run(["bash", "-c", line], check=True)
    parts = sorted(target.glob("caches.tar.xz.*"))
    packed = sum(part.stat().st_size for part in parts)
    print(
        f"{len(files)} files, {size / 2**20:.1f} MiB: packed {packed / 2**20:.1f} MiB", flush=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="single")
    parser.add_argument("--rows", default="", help="default: all of the suite")
    parser.add_argument("--arms", default="", help="default: all that fit the ranks")
    parser.add_argument("--op", choices=("fwd", "fwdbwd"), default="fwdbwd", help="what is run")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600, help="then what runs is stopped")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/warm"), help="an absolute path")
    parser.add_argument("--pack", type=Path, help="folder for the packed caches")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks < 1 or options.processes < 1 or not options.cache.is_absolute():
        parser.error("--ranks and --processes must be at least 1, --cache an absolute path")
    names = [tuple(filter(None, text.split(","))) for text in (options.rows, options.arms)]
    try:
        rows = chosen_rows(suite_named(options.suite), names[0])
        if options.worker:
            return worker(all_arms()[options.arms], rows[0], options.op, options.cache)
        arms = chosen_arms(names[1], options.ranks)
    except InvalidInput as error:
        parser.error(str(error))
    for folder in ("logs", "used", "triton", "tilelang"):
        (options.cache / folder).mkdir(parents=True, exist_ok=True)
    complete = run_all(jobs_of(rows, arms), options)
    if options.pack:
        pack(options.cache, options.pack, complete)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
