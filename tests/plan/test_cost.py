"""Bytes of a call against counts made another way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longdelta.errors import InvalidInput
from longdelta.plan import (
    Bytes,
    Partition,
    bytes_needed,
    chains,
    cost,
    crossings,
    partition,
    rank_walk,
    summaries,
)
from longdelta.plan.cost import rank_counts
from longdelta.plan.tensors import SAVE_MODES, Counts, capacity

from .strategies import partitions

HEADS = {"num_heads": 1, "num_v_heads": 2, "head_k_dim": 16, "head_v_dim": 8}
STATE = 2 * 16 * 8 * 4
MAP = 2 * 16 * 16 * 4


def _needs(plan: Partition, rank: int, **options: object) -> Bytes:
    pieces = [[(p.document, p.offset, p.length) for p in held] for held in plan.fragments]
    given_options = {**HEADS, "ranks": plan.ranks, "rank": rank, "rows": plan.rows, **options}
    return bytes_needed(plan.cu_seqlens, layout="fragments", fragments=pieces, **given_options)


@given(partitions())
def test_relay_sends_one_state_per_crossing_and_nothing_else(plan: Partition) -> None:
    needs = [_needs(plan, rank) for rank in range(plan.ranks)]
    for direction, backward in (("forward", False), ("backward", True)):
        hops = crossings(plan, backward=backward)
        for rank, need in enumerate(needs):
            assert need.sent(direction) == STATE * sum(hop.source == rank for hop in hops)
            assert need.received(direction) == STATE * sum(hop.target == rank for hop in hops)
    names = [[(c.name, c.direction, c.step) for c in need.collectives] for need in needs]
    assert all(each == names[0] for each in names)  # every rank joins every collective


@given(partitions())
def test_summaries_send_equal_padded_slots_unless_states_are_enough(plan: Partition) -> None:
    needs = [_needs(plan, rank, deterministic=False) for rank in range(plan.ranks)]
    if all(len(chain.links) <= 2 for chain in chains(plan)):
        assert needs == [
            Bytes(n.saved, n.workspace_forward, n.workspace_backward, _needs(plan, r).collectives)
            for r, n in enumerate(needs)
        ]
        return
    slots = [0] * plan.ranks
    for hop in crossings(plan):
        slots[hop.source] += 1
    assert summaries(plan).slot_count == max(slots)
    for need in needs:
        assert [c.name for c in need.collectives] == ["summaries", "summaries"]
        assert need.sent("forward") == max(slots) * (STATE + MAP)
        assert need.received("forward") == need.sent("forward") * (plan.ranks - 1)


@given(partitions(), st.integers(1, 5))
def test_halo_bytes_leave_one_rank_and_reach_another(plan: Partition, kernel_size: int) -> None:
    needs = [
        _needs(plan, rank, conv1d_kernel_size=kernel_size, conv_channels=10)
        for rank in range(plan.ranks)
    ]
    total = [0, 0]
    for need in needs:
        for c in need.collectives:
            if c.name == "halo":
                forward = c.direction == "forward"
                total[0] += c.sent - c.received
                assert (c.sent + c.received) % (10 * (2 if forward else 4)) == 0
                total[1] += c.sent * (2 if forward else -1)
    assert total == [0, 0]


@given(partitions(), st.sampled_from([2, 32]), st.booleans())
def test_saved_capacity_holds_every_walk_of_a_rank(
    plan: Partition, heads: int, deterministic: bool
) -> None:
    for rank in range(plan.ranks):
        counts = Counts.of(rank_walk(plan, rank, heads, deterministic))
        assert rank_counts(plan, rank, heads, deterministic) == counts
        held = len(plan.fragments[rank])
        most = capacity(plan.local_rows(rank), held, heads, edges=plan.edges(rank))
        assert counts.chunks <= most.chunks
        assert counts.borders <= most.borders
        assert counts.maps <= most.maps


@pytest.mark.parametrize("save", SAVE_MODES)
def test_one_device_sends_nothing_and_saves_by_mode(save: str) -> None:
    need = bytes_needed([0, 4096], num_heads=2, num_v_heads=6, save=save, compiled=True)
    assert need.collectives == ()
    state = 6 * 128 * 128 * 4
    chunk = 6 * (128 * 128 + 64 * 128 + 64 * 64 + 64) * 4
    chunks, borders = 4096 // 64 + 1, 8
    bounds = 7 * 256  # 6 * 4 bytes a chunk, in whole places; those of maps fit into one
    assert (
        need.saved
        == {
            "none": 0,
            "light": 2 * borders * state + 256,
            "full": 2 * borders * state + 256 + chunks * chunk + bounds,
        }[save]
    )


def test_exchanges_are_planned_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[str] = []
    for name in ("relay_rounds", "halo"):
        right = getattr(cost, name)

        def counted(*args: object, name: str = name, right: Any = right, **options: object) -> Any:
            planned.append(name)
            return right(*args, **options)

        monkeypatch.setattr(cost, name, counted)
    plan = partition([0, 1000, 1234], 8, "zigzag")
    for rank in range(8):
        for deterministic in (True, False):
            cost.rank_bytes(
                plan, rank, cost.Heads(1, 2), deterministic=deterministic, conv1d_kernel_size=4
            )
    assert sorted(planned) == ["halo", "relay_rounds", "relay_rounds"]


def test_a_batch_without_boundaries_is_its_equal_documents() -> None:
    need = bytes_needed([0, 512, 1024], num_heads=2, num_v_heads=2, save="none")
    inverse, gates, bounds = 16 * 2 * 64 * 64 * 4, 16 * 2 * 64 * 4, 256
    assert need.workspace_forward == inverse + gates + bounds


def test_inputs_that_come_raw_need_their_places_in_both_directions() -> None:
    def workspaces(*activated: str, backend: str = "gluon") -> tuple[int, int]:
        heads = {"num_heads": 2, "num_v_heads": 6}
        need = bytes_needed([0, 512], activated=activated, backend=backend, **heads)
        return need.workspace_forward, need.workspace_backward

    plain, unit, gate = workspaces(), workspaces("q_unit", "k_unit"), workspaces("g")
    for direction in range(2):  # backward, each has a cotangent, in float32
        assert unit[direction] - plain[direction] == 2 * 512 * 2 * 128 * (2 + 4 * direction)
        assert gate[direction] - plain[direction] == 512 * 6 * (4 + 4 * direction) + 512 * direction


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activated": ["v"]}, "activated must be some of q_unit, k_unit, g, beta; got 'v'"),
        ({"num_v_heads": 3, "num_heads": 2}, "num_v_heads must be a multiple of num_heads = 2"),
        ({"num_heads": 0}, "num_heads must be an integer of at least 1, got 0"),
        ({"num_heads": "1"}, "num_heads must be an integer of at least 1, got '1'"),
        ({"num_v_heads": True}, "num_v_heads must be an integer of at least 1, got True"),
        ({"head_k_dim": 1.5}, "head_k_dim must be an integer of at least 1, got 1.5"),
        ({"head_v_dim": None}, "head_v_dim must be an integer of at least 1, got None"),
        ({"conv_channels": -7}, "conv_channels must be an integer of at least 1, got -7"),
        ({"conv1d_kernel_size": 4.0}, "conv1d_kernel_size must be an integer .* got 4.0"),
        ({"conv1d_kernel_size": 0}, "conv1d_kernel_size must be an integer .* got 0"),
        ({"deterministic": "no"}, "deterministic must be True or False, got 'no'"),
        ({"ranks": "2"}, "ranks must be an integer of at least 1, got '2'"),
        ({"rank": 0.5}, "rank must be an integer of at least 0, got 0.5"),
        ({"rank": -1}, "rank must be an integer of at least 0, got -1"),
        ({"backend": "abacus"}, "backend must be one of eager, gluon, got 'abacus'"),
        ({"backend": "gluon", "dtype": "float32"}, "'gluon' takes dtype bfloat16 .* got float32"),
        ({"backend": "gluon", "head_v_dim": 64}, "'gluon' takes .* 128; got bfloat16, 128 and 64"),
        ({"dtype": "int8"}, "dtype must be one of .*, got 'int8'"),
        ({"save": "all"}, "save must be one of none, light, full, got 'all'"),
        ({"rank": 2, "ranks": 2}, r"rank must be in \[0, 2\), got 2"),
    ],
)
def test_bytes_needed_names_the_argument_that_is_wrong(arguments: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        bytes_needed([0, 64], **{"num_heads": 2, "num_v_heads": 6, **arguments})


def test_the_fast_mode_fills_the_device_of_each_rank_not_one_with_the_work_of_all() -> None:
    plan = partition([65536 * n for n in range(9)], 8)
    for rank in range(plan.ranks):
        walk = rank_walk(plan, rank, 32, deterministic=False)
        assert [segment.chunks for segment in walk.segments] == [128] * 8
