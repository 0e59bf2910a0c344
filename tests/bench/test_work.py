"""The counts of kernels at their leanest, and the ceilings they are held against."""

from __future__ import annotations

import pytest

from longdelta.bench.rows import Row
from longdelta.bench.work import Ceilings, Work, measured_ceilings, work_of

from .scripted import CPU, Scripted


@pytest.mark.parametrize(
    ("G", "forward", "backward"), [(2, 151_552, 466_944), (3, 146_091, 464_213)]
)
def test_flops_per_token_and_value_head_match_the_hand_count(
    G: int, forward: int, backward: int
) -> None:
    row = Row("one", 1, G, (6_400,))
    heads = 6_400 * G
    assert round(work_of(row, "fwd").flops / heads) == forward
    assert round(work_of(row, "bwd").flops / heads) == backward


def test_bytes_count_each_tensor_once() -> None:
    row, G = Row("one", 1, 2, (64,)), 2
    assert work_of(row, "fwd").bytes == 64 * G * (512 // G + 256 + 256 + 8)
    assert work_of(row, "bwd").bytes == 64 * G * (1024 // G + 768 + 16 + 128)


def test_checkpointed_is_two_forwards_and_a_backward() -> None:
    row = Row("one", 2, 6, (100, 28))
    ahead, back, twice = (work_of(row, op) for op in ("fwd", "bwd", "checkpointed"))
    assert twice.flops == 2 * ahead.flops + back.flops
    assert twice.bytes == 2 * ahead.bytes + back.bytes


def test_floor_is_the_slower_of_products_and_copies_shared_by_the_ranks() -> None:
    ceilings = Ceilings(flops_per_s=1e12, bytes_per_s=1e12)
    assert ceilings.floor_ms(Work(2 * 10**9, 10**9), ranks=1) == 2.0
    assert ceilings.floor_ms(Work(10**9, 4 * 10**9), ranks=2) == 2.0


def test_ceilings_come_from_a_product_and_a_copy_of_this_run() -> None:
    timer = Scripted(lambda slot: {"matmul": 2.0, "copy": 4.0}[slot.arm])
    found = measured_ceilings(CPU, timer, 0, 1)
    assert found == Ceilings(2 * 256**3 / 2e-3, 2 * 2**28 / 4e-3)
