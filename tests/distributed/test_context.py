"""What a context says, agrees on once, and hands to the op."""

from __future__ import annotations

import pytest
import torch

import longdelta
from longdelta.distributed import build_cp_context
from longdelta.errors import InvalidInput
from longdelta.testing.ranks import Failure, RankPool
from longdelta.testing.workloads import Workload, assert_bitwise, evaluate

from .rank_context import compiled, default_group, facts, saved_of_another, without_autograd

WORK = Workload(lengths=(700, 0, 1100, 9), K=8, V=8)


def test_context_tells_each_rank_its_rows_and_the_states_that_it_owns(pool: RankPool) -> None:
    found = pool.run(2, facts, [0, 6, 6, 10], {"rows": 12})
    assert [each["place"] for each in found] == [(0, 2), (1, 2)]
    assert [each["starts"] for each in found] == [(0,), (1, 2)]
    assert [each["ends"] for each in found] == [(), (0, 1, 2)]
    assert [each["rows"] for each in found] == [5, 7]
    assert [each["cu_seqlens"] for each in found] == [[0, 5], [0, 1, 1, 5]]
    assert found[1]["text"].startswith("rank 1 of\ncontiguous partition, 2 ranks, align=token")


def test_context_takes_the_fragments_in_the_place_of_a_layout(pool: RankPool) -> None:
    pieces = [[(0, 4, 2)], [(0, 0, 4)]]
    found = pool.run(2, facts, [0, 6], {"layout": pieces})
    named = pool.run(2, facts, [0, 6], {"layout": "fragments", "fragments": pieces})
    assert [each["rows"] for each in found] == [2, 4]
    assert [each["text"] for each in found] == [each["text"] for each in named]


def test_context_agrees_once_on_32_bytes_a_rank(pool: RankPool) -> None:
    for each in pool.run(3, facts, [0, 64], {}):
        assert each["exchanged"] == [("agree", 32, 64)]


def test_context_keeps_the_contract_for_the_heads_whose_segments_it_was_cut_on(
    pool: RankPool,
) -> None:
    batch = [0, 4096]
    for each in pool.run(2, facts, batch, {"align": "segment", "num_v_heads": 4}):
        assert each["contract"] == [True, False, False]
    for each in pool.run(2, facts, batch, {"align": "segment"}):
        # Borders for any number of heads: this document has none, and stays whole.
        assert each["contract"] == [True, True, True]
    for each in pool.run(2, facts, batch, {"layout": "zigzag"}):
        assert each["contract"] == [True, False, False]  # 1024 is a border by chance
    for each in pool.run(2, facts, [0, 4000], {}):
        assert each["contract"] == [False] * 3


def test_context_without_a_group_spans_all_processes_of_the_default_one(pool: RankPool) -> None:
    assert pool.run(4, default_group) == [(rank, 4) for rank in range(4)]


def test_context_of_one_process_is_the_plain_op() -> None:
    context = build_cp_context(WORK.offsets, rows=WORK.rows)
    assert (context.rank, context.ranks) == (0, 1)
    inputs, cotangents = WORK.inputs(torch.float32), WORK.cotangents(torch.float32)
    plain = evaluate(inputs, cotangents)
    assert_bitwise(evaluate(inputs.with_(cu_seqlens=None), cotangents, cp_context=context), plain)
    with pytest.raises(InvalidInput, match="cu_seqlens must be None with cp_context"):
        evaluate(inputs, cotangents, cp_context=context)


def test_context_shards_to_its_device() -> None:
    context = build_cp_context([0, 4], device="meta")
    assert context.shard(torch.zeros(1, 4, 2)).device.type == "meta"
    assert build_cp_context([0, 4]).shard(torch.zeros(1, 4, 2)).device.type == "cpu"


@pytest.mark.parametrize("device", ["foo", 1.5])
def test_context_refuses_a_device_that_is_none_on_every_rank(
    pool: RankPool, device: object
) -> None:
    for found in pool.outcomes(2, facts, [0, 4], {"device": device}):
        assert isinstance(found, Failure)
        assert found.kind == "InvalidInput"
        assert f"device must be one of torch or None, got {device!r}" in found.message


@pytest.mark.parametrize("size", [0, 4.0, "4"])
def test_context_refuses_a_kernel_size_that_is_no_size(size: object) -> None:
    with pytest.raises(InvalidInput, match=f"conv1d_kernel_size must be .*, got {size!r}"):
        build_cp_context([0, 4], conv1d_kernel_size=size)


def test_context_names_what_convert_cannot_use() -> None:
    context = build_cp_context([0, 4])
    with pytest.raises(InvalidInput, match="other must come from build_cp_context, got NoneType"):
        context.convert(torch.zeros(1, 4), None)
    with pytest.raises(InvalidInput, match="x must be a tensor, got NoneType"):
        context.shard(None)
    with pytest.raises(InvalidInput, match=r"x must have 4 rows along dim 2; got \[1, 4\]"):
        context.unshard(torch.zeros(1, 4), dim=2)


def test_op_names_the_rows_that_a_rank_must_hand_over() -> None:
    context = build_cp_context([0, 4])
    q, g = torch.zeros(1, 5, 1, 8), torch.zeros(1, 5, 1)
    with pytest.raises(InvalidInput, match=r"q must be \[1, 4, H, K\].*see cp_context.shard"):
        longdelta.chunk_gated_delta_rule(q, q, q, g, g, cp_context=context)


def test_op_without_autograd_has_the_same_bits_on_ranks_in_every_save_mode(
    pool: RankPool,
) -> None:
    assert pool.run(3, without_autograd, WORK) == [True] * 3


def test_backward_refuses_what_the_forward_of_another_context_saved(pool: RankPool) -> None:
    for message in pool.run(2, saved_of_another):
        assert "saved must come from gdn_forward with the same shapes and options" in message


def test_op_on_ranks_compiles_and_serves_a_second_plan(pool: RankPool) -> None:
    assert pool.run(2, compiled, WORK) == [True] * 2
