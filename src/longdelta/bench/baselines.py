"""The arms: this package and the libraries it is compared with, each behind the same call.

A peer is imported when it is asked for and nowhere else. Its adapter calls the public function with
q, k, v, a ready g and beta, and no states: not every peer has these under context parallelism.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longdelta.bench.heads import HeadSplit, Op, by_heads
from longdelta.bench.problem import Problem
from longdelta.errors import InvalidInput, UnsupportedProblem

ONE, MANY, ANY = "one rank", "several ranks", "any ranks"
CHECKED = {"fla-core": "0.6.0", "flash-qla": "0.1.3", "attn-gym": "0.0.17"}
"""Releases of the peers that the adapters below were written for; missing ones are named so."""


def _same(x: Tensor) -> Tensor:
    return x


def plain_checkpoint(fn: Op, *tensors: Tensor) -> Tensor:
    """torch's own; the op draws no random numbers, and a captured graph could not save them."""
    o: Tensor = checkpoint(fn, *tensors, use_reentrant=False, preserve_rng_state=False)
    return o


@dataclass(frozen=True)
class Runner:
    """An arm made ready for a row on this rank.

    Attributes:
        op: (q, k, v, g, beta) of this rank -> o of this rank.
        shard: a whole ``[1, T, ...]`` -> what `op` takes here.
        whole: the inverse, on every rank.
        checkpoint: runs `op` now and again in its backward.
        active: whether this rank computes at all.
    """

    op: Op
    shard: Callable[[Tensor], Tensor] = _same
    whole: Callable[[Tensor], Tensor] = _same
    checkpoint: Callable[..., Tensor] = plain_checkpoint
    active: bool = True


@dataclass(frozen=True)
class Arm:
    """One column of the table.

    Attributes:
        says: what it is, for tables.
        where: on how many ranks it makes sense.
        module: what must be importable; None: this package.
        distribution: the package's name for pip and for the version.
        needs: another module that it imports, and what pip calls it.
        build: makes a `Runner`.
        family: the package's module that gives this arm, where it is this package or a revision.
    """

    name: str
    says: str
    where: str
    build: Callable[[Problem], Runner]
    module: str | None = None
    distribution: str = "longdelta"
    family: str = ""
    needs: tuple[str, str] | None = None

    def missing(self) -> str:
        """Why it cannot be imported here, or nothing."""
        own = [] if self.module is None else [(self.module, self.distribution)]
        wanted = [*own, *([] if self.needs is None else [self.needs])]
        absent = [name for module, name in wanted if importlib.util.find_spec(module) is None]
        named = [f"{name}=={CHECKED[name]}" if name in CHECKED else name for name in absent]
        return f"not installed: pip install {' '.join(named)}" if named else ""

    def version(self) -> str:
        """Version of the package, or "" where it has none."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return ""


def own(package: ModuleType, deterministic: bool) -> Callable[[Problem], Runner]:
    """This package, or a revision of it, through its public entry."""

    def build(problem: Problem) -> Runner:
        entry, place = package.chunk_gated_delta_rule, problem.place
        if place.ranks == 1:
            bounds: dict[str, Any] = {
                "cu_seqlens": problem.cu_seqlens,
                "cu_seqlens_cpu": problem.cu_seqlens_cpu,
            }
            return Runner(lambda *x: entry(*x, deterministic=deterministic, **bounds)[0])
        context = package.distributed.build_cp_context(
            problem.row.offsets, place.group, problem.row.layout, device=place.device
        )
        return Runner(
            lambda *x: entry(*x, deterministic=deterministic, cp_context=context)[0],
            context.shard,
            context.unshard,
            getattr(package.distributed, "checkpoint", plain_checkpoint),
        )

    return build


def revision_arm(package: ModuleType, commit: str) -> Arm:
    """A revision of this package as an arm."""
    says = f"this package at {commit[:12]}"
    return Arm("base", says, ANY, own(package, True), family=package.__name__)


def fla_op() -> Op:
    """FLA's own kernels: it would hand the call to FlashQLA where that is installed."""
    peer = importlib.import_module("fla.ops.gated_delta_rule")
    theirs = importlib.import_module("fla.ops.gated_delta_rule.backends.flash_qla")
    theirs.FlashQLABackend.default_enable = False
    op: Op = peer.chunk_gated_delta_rule
    return op


def flash_qla_op() -> Op:
    """FlashQLA's own entry."""
    op: Op = importlib.import_module("flash_qla").chunk_gated_delta_rule
    return op


def _on_one(load: Callable[[], Op]) -> Callable[[Problem], Runner]:
    def build(problem: Problem) -> Runner:
        op, bounds = load(), problem.cu_seqlens
        return Runner(lambda *x: op(*x, cu_seqlens=bounds)[0])

    return build


def _attn_gym(problem: Problem) -> Runner:
    op = importlib.import_module("attn_gym.linear.gdn").chunk_gdn
    bounds = problem.cu_seqlens
    return Runner(lambda *x: op(*x, cu_seqlens=bounds)[0])


def _contiguous(problem: Problem) -> Any:
    """Our context, used to cut and join what peers with contiguous shards take."""
    from longdelta.distributed import build_cp_context

    place = problem.place
    return build_cp_context(problem.row.offsets, place.group, device=place.device)


def _divisible(problem: Problem, name: str) -> None:
    if problem.row.tokens % problem.place.ranks:
        raise UnsupportedProblem(
            f"{name} needs tokens that the ranks divide: {problem.row.tokens} on "
            f"{problem.place.ranks}"
        )


def _fla_kcp(problem: Problem) -> Runner:
    _divisible(problem, "FLA KCP")
    op, shards = fla_op(), _contiguous(problem)
    build = importlib.import_module("fla.ops.cp").build_cp_context
    context = build(problem.cu_seqlens, problem.place.group, cu_seqlens_cpu=problem.cu_seqlens_cpu)
    return Runner(
        lambda *x: op(*x, cp_context=context)[0],
        shards.shard,
        shards.unshard,
    )


def _flash_qla_cp(problem: Problem) -> Runner:
    _divisible(problem, "FlashQLA's inter-card CP")
    op, shards = flash_qla_op(), _contiguous(problem)
    build = importlib.import_module(
        "flash_qla.ops.gated_delta_rule.chunk.cp.context"
    ).build_cp_context
    context = build(
        problem.cu_seqlens,
        enable_inter=True,
        enable_intra=True,
        group=problem.place.group,
        num_v_heads=problem.row.HV,
        chunk_size=64,
        cu_seqlens_cpu=problem.cu_seqlens_cpu,
        is_train=True,
    )
    return Runner(
        lambda *x: op(*x, cp_context=context)[0],
        shards.shard,
        shards.unshard,
    )


def _by_heads(load: Callable[[], Op]) -> Callable[[Problem], Runner]:
    def build(problem: Problem) -> Runner:
        place, row = problem.place, problem.row
        assert place.group is not None
        shards = _contiguous(problem)
        rows = tuple(shards.partition.local_rows(rank) for rank in range(place.ranks))
        whole, bounds = load(), problem.cu_seqlens
        op = by_heads(
            lambda *x: whole(*x, cu_seqlens=bounds)[0],
            HeadSplit(rows, place.rank, place.group),
            row.H,
            row.HV,
        )
        return Runner(op, shards.shard, shards.unshard)

    return build


def _flash_qla_one_gpu(problem: Problem) -> Runner:
    alone = _on_one(flash_qla_op)(problem) if problem.place.rank == 0 else Runner(_same)
    return Runner(alone.op, active=problem.place.rank == 0)


def _own_op() -> Op:
    import longdelta

    return longdelta.chunk_gated_delta_rule  # type: ignore[return-value]


def _own_arms() -> tuple[Arm, ...]:
    import longdelta

    return (
        Arm("ours", "deterministic", ANY, own(longdelta, True), family="longdelta"),
        Arm("ours_fast", "deterministic=False", ANY, own(longdelta, False), family="longdelta"),
        Arm("ours_heads", "all-to-all to heads around ours", MANY, _by_heads(_own_op)),
    )


def _peers() -> tuple[Arm, ...]:
    fla, qla, gym = ("fla", "fla-core"), ("flash_qla", "flash-qla"), ("attn_gym", "attn-gym")
    # Its Triton kernels share a file with kernels in CuTe.
    cute = ("cutlass", "nvidia-cutlass-dsl")
    one_gpu = "FlashQLA, the whole row on one GPU"
    return (
        Arm("fla", "FLA", ONE, _on_one(fla_op), *fla),
        Arm("flash_qla", "FlashQLA", ONE, _on_one(flash_qla_op), *qla),
        Arm("attn_gym", "attention-gym", ONE, _attn_gym, *gym, needs=cute),
        Arm("fla_kcp", "FLA KCP", MANY, _fla_kcp, *fla),
        Arm("fla_heads", "all-to-all to heads around FLA", MANY, _by_heads(fla_op), *fla),
        Arm("flash_qla_cp", "FlashQLA's inter-card CP", MANY, _flash_qla_cp, *qla),
        Arm(
            "flash_qla_heads",
            "all-to-all to heads around FlashQLA",
            MANY,
            _by_heads(flash_qla_op),
            *qla,
        ),
        Arm("flash_qla_one_gpu", one_gpu, MANY, _flash_qla_one_gpu, *qla),
    )


def all_arms() -> dict[str, Arm]:
    """Every arm by its name; nothing of a peer is imported."""
    return {arm.name: arm for arm in (*_own_arms(), *_peers())}


def chosen_arms(names: Sequence[str], ranks: int) -> tuple[Arm, ...]:
    """The named arms; for no name, all that make sense on that many ranks.

    Raises:
        InvalidInput: an arm does not exist; lists those that do.
    """
    arms = all_arms()
    for name in names:
        if name not in arms:
            listed = ", ".join(f"{arm.name} ({arm.where})" for arm in arms.values())
            raise InvalidInput(f"arms: {name!r} does not exist; there are {listed}")
    fitting = (ANY, ONE if ranks == 1 else MANY)
    if names:
        for name in names:
            if arms[name].where not in fitting:
                raise InvalidInput(f"arms: {name} runs on {arms[name].where}; here are {ranks}")
        return tuple(arms[name] for name in names)
    return tuple(a for a in arms.values() if a.where in fitting and a.name != "ours_heads")


def whole_inputs(problem: Problem, runner: Runner) -> tuple[Tensor, ...]:
    """The leaves of an arm on this rank: shards that want gradients."""
    return tuple(runner.shard(x).detach().requires_grad_() for x in problem.inputs)


def cotangent(problem: Problem, runner: Runner, do: Tensor | None = None) -> Tensor:
    """The cotangent of an arm's output on this rank."""
    return runner.shard(problem.do if do is None else do).detach()


def release(device: torch.device) -> None:
    """Gives back cached memory, so that one arm's peak is not the next one's shortage.

    An error that was caught may still hold its frames' tensors in a cycle.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
