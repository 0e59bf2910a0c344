"""The op on 1 to 4 ranks: one device's bits where cuts allow it, the reference's values always."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from longdelta.plan.chunks import packed_for_speed
from longdelta.plan.cost import bytes_needed, state_collectives
from longdelta.plan.flops import Heads
from longdelta.testing.budgets import EAGER
from longdelta.testing.ranks import RankPool
from longdelta.testing.workloads import (
    Results,
    Workload,
    assert_bitwise,
    assert_results,
    evaluate,
    expected,
)

from .rank_op import continued, op, warned
from .whole import plan_of, whole

HV = 4
# With four value heads a segment is 512 tokens: borders at 512 and at each 512 of the long one, no
# border in the document of exactly one segment; empty, single-token and short documents between.
ALIGNED = Workload(lengths=(700, 0, 1600, 1, 99, 512, 0, 513), gates="model", K=8, V=12)
# Cuts anywhere: in chunks, at a document's first token, in documents shorter than a chunk.
RAGGED = Workload(lengths=(37, 0, 230, 1, 64, 700), gates="slow", betas="small", K=8, V=12)
EXPLICIT = {
    # One document by all ranks, out of order and coming back; the last rank has none of the rest.
    2: [
        [(0, 512, 188), (2, 0, 512), (2, 1024, 576), (7, 0, 513)],
        [(0, 0, 512), (2, 512, 512), (3, 0, 1), (4, 0, 99), (5, 0, 512)],
    ],
    3: [
        [(2, 1024, 576), (0, 0, 700)],
        [],
        [(2, 0, 1024), (3, 0, 1), (4, 0, 99), (5, 0, 512), (7, 0, 513)],
    ],
    4: [
        [(2, 1536, 64), (0, 0, 512)],
        [(2, 0, 512), (7, 512, 1)],
        [(2, 1024, 512), (3, 0, 1)],
        [(2, 512, 512), (0, 512, 188), (4, 0, 99), (5, 0, 512), (7, 0, 512)],
    ],
}
LAYOUTS = ["contiguous", "zigzag", "zigzag_per_document", "balanced"]


def builds(work: Workload, ranks: int, align: str) -> list[dict[str, Any]]:
    """Every layout; explicit fragments too for the documents of the aligned workload."""
    common = {"align": align, "num_v_heads": HV}
    found: list[dict[str, Any]] = [{"layout": layout, **common} for layout in LAYOUTS]
    if align == "segment" and work.lengths == ALIGNED.lengths and ranks in EXPLICIT:
        found.append({"layout": "fragments", "fragments": EXPLICIT[ranks], **common})
    return found


@lru_cache(maxsize=16)
def one_device(work: Workload, dtype: torch.dtype) -> Results:
    return evaluate(work.inputs(dtype), work.cotangents(dtype))


def on_ranks(
    pool: RankPool, ranks: int, work: Workload, dtype: torch.dtype, align: str, **options: Any
) -> list[tuple[Any, Results, list[Any]]]:
    """(plan, results of the whole batch, what each rank exchanged) of every layout."""
    chosen = builds(work, ranks, align)
    answers = pool.run(ranks, op, work, dtype, chosen, options)
    found = []
    for index, build in enumerate(chosen):
        plan = plan_of(work, ranks, **build)
        parts = [answer[index] for answer in answers]
        found.append((plan, whole(plan, [x for x, _ in parts]), [log for _, log in parts]))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_op_on_ranks_has_one_devices_bits_in_every_layout(
    pool: RankPool, ranks: int, dtype: torch.dtype
) -> None:
    for plan, results, _ in on_ranks(pool, ranks, ALIGNED, dtype, "segment"):
        assert plan.keeps_contract(HV)
        assert_bitwise(results, one_device(ALIGNED, dtype))
        assert all(x is not None for x in results), plan.layout


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_op_on_ranks_matches_the_recurrence_for_cuts_anywhere(
    pool: RankPool, ranks: int, deterministic: bool
) -> None:
    found = on_ranks(pool, ranks, RAGGED, torch.float64, "token", deterministic=deterministic)
    for _, results, _ in found:
        assert_results(results, expected(RAGGED))


def test_ranks_may_cut_what_they_share_by_different_rules_in_the_fast_mode(pool: RankPool) -> None:
    work = Workload((60, 1300, 700, 700, 700, 1300, 1300), gates="slow", betas="small", K=8, V=12)
    found = on_ranks(pool, 2, work, torch.float64, "token", deterministic=False)
    plan = found[0][0]
    rules = [packed_for_speed(plan.fragments[rank], plan.document_tokens, HV) for rank in (0, 1)]
    assert rules == [None, plan.tokens(1)]
    assert plan.fragments[0][-1].document == plan.fragments[1][0].document
    for _, results, _ in found:
        assert_results(results, expected(work))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_op_with_summaries_is_within_budget(pool: RankPool, dtype: torch.dtype) -> None:
    for align, work in (("segment", replace(ALIGNED, gates="slow")), ("token", RAGGED)):
        for plan, results, logs in on_ranks(pool, 4, work, dtype, align, deterministic=False):
            names = {each.name for log in logs for each in log}
            assert names <= {"relay", "summaries"}, plan.layout
            assert_results(results, expected(work, dtype), EAGER)


def test_op_with_summaries_keeps_its_precision_where_a_document_forgets_little(
    pool: RankPool,
) -> None:
    """Maps composed over four ranks in float32: in 16 bits their product would be far off."""
    work = Workload(lengths=(2048,), gates=-1e-3, betas="small", K=8, V=8, tail=0)
    for plan, results, logs in on_ranks(
        pool, 4, work, torch.bfloat16, "token", deterministic=False
    ):
        assert {each.name for log in logs for each in log} == {"summaries"}, plan.layout
        assert_results(results, expected(work, torch.bfloat16), EAGER)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("deterministic", [True, False])
def test_op_sends_the_bytes_of_the_plan_in_every_collective(
    pool: RankPool, ranks: int, deterministic: bool
) -> None:
    sizes = {"num_heads": ALIGNED.H, "num_v_heads": HV, "head_k_dim": 8, "head_v_dim": 12}
    for align in ("segment", "token"):
        crossed = set()
        found = on_ranks(pool, ranks, ALIGNED, torch.bfloat16, align, deterministic=deterministic)
        for (plan, _, logs), build in zip(found, builds(ALIGNED, ranks, align), strict=True):
            for rank, log in enumerate(logs):
                need = bytes_needed(
                    ALIGNED.offsets,
                    ranks=ranks,
                    rank=rank,
                    rows=ALIGNED.rows,
                    deterministic=deterministic,
                    **sizes,
                    **{name: value for name, value in build.items() if name != "num_v_heads"},
                )
                wanted = [(c.name, c.sent, c.received) for c in need.collectives]
                assert [(c.name, c.sent, c.received) for c in log] == wanted, (plan, rank)
                crossed |= {c.name for c in log}
        assert crossed == ({"relay"} if deterministic else {"relay", "summaries"} & crossed)
        assert crossed


@pytest.mark.parametrize("save", ["none", "light", "full"])
def test_op_on_ranks_has_the_same_bits_in_every_save_mode(pool: RankPool, save: str) -> None:
    for plan, results, logs in on_ranks(pool, 3, ALIGNED, torch.float32, "segment", save=save):
        assert_bitwise(results, one_device(ALIGNED, torch.float32))
        # Without a saved set the backward repeats the forward, its messages included.
        heads = Heads(ALIGNED.H, HV, ALIGNED.K, ALIGNED.V)
        rounds = len(state_collectives(plan, 0, heads, True, "forward"))
        assert {len(log) for log in logs} == {rounds * (3 if save == "none" else 2)}


@pytest.mark.parametrize("deterministic", [True, False])
def test_op_repeats_its_bits_for_cuts_anywhere(pool: RankPool, deterministic: bool) -> None:
    first, again = (
        on_ranks(pool, 4, RAGGED, torch.bfloat16, "token", deterministic=deterministic)
        for _ in range(2)
    )
    for (plan, one, _), (_, two, _) in zip(first, again, strict=True):
        assert not plan.keeps_contract(HV)
        assert_bitwise(one, two)


@pytest.mark.parametrize("leaves", [("v",), ("g", "initial_state"), ("q",)])
def test_op_on_ranks_has_the_same_bits_whichever_gradients_are_asked_for(
    pool: RankPool, leaves: tuple[str, ...]
) -> None:
    for _, results, _ in on_ranks(pool, 3, ALIGNED, torch.float32, "segment", leaves=leaves):
        assert_bitwise(results, one_device(ALIGNED, torch.float32))
        given = [f"d_{x}" if x == "initial_state" else f"d{x}" for x in leaves]
        assert [x for x in Results._fields[2:] if getattr(results, x) is not None] == given


def test_op_on_ranks_starts_from_zero_states_where_none_is_given(pool: RankPool) -> None:
    work = replace(ALIGNED, initial=False)
    for _, results, _ in on_ranks(pool, 3, work, torch.float32, "segment"):
        assert_bitwise(results, one_device(work, torch.float32))
        assert results.d_initial_state is None


# Lists on which other libraries went wrong, cut down to this project's segment of 512 tokens.
PACKINGS = {
    "boundary_on_a_rank_edge": (512, 512),
    "one_document_over_all_ranks": (1024,),
    "many_documents_per_rank": (100, 150, 200, 250, 124, 100, 100),
    "a_single_token_at_the_edge": (512, 1, 511),
    "tokens_no_multiple_of_the_ranks": (7, 3),
    "fewer_tokens_than_ranks": (2,),
    "single_tokens": (1, 1, 1, 1, 1),
    "empty_documents_at_both_ends": (0, 0, 65, 0),
    "only_empty_documents": (0, 0),
}


@pytest.mark.parametrize("lengths", PACKINGS.values(), ids=PACKINGS.keys())
@pytest.mark.parametrize("ranks", [2, 4])
def test_op_takes_every_packing(pool: RankPool, ranks: int, lengths: tuple[int, ...]) -> None:
    work = Workload(lengths=lengths, gates="reset", tail=0, K=8, V=8)
    for deterministic in (True, False):
        for _, results, _ in on_ranks(
            pool, ranks, work, torch.float64, "token", deterministic=deterministic
        ):
            assert_results(results, expected(work))
    for _, results, _ in on_ranks(pool, ranks, work, torch.float32, "segment"):
        assert_bitwise(results, one_device(work, torch.float32))


def test_op_reads_the_states_it_gave_as_it_does_on_one_device(pool: RankPool) -> None:
    """A document over four ranks, continued from its own final state."""
    answers = pool.run(4, continued, ALIGNED)
    o, state = evaluate(
        ALIGNED.inputs(torch.float32), ALIGNED.cotangents(torch.float32), leaves=()
    )[:2]
    inputs = ALIGNED.inputs(torch.float32).with_(initial_state=state)
    again = evaluate(inputs, ALIGNED.cotangents(torch.float32), leaves=())
    assert not torch.equal(o, again.o)
    plan = plan_of(ALIGNED, 4, layout="zigzag", align="segment", num_v_heads=HV)
    assert_bitwise(whole(plan, answers), again)


def test_op_says_once_that_cuts_off_the_borders_give_only_run_to_run_bits(
    pool: RankPool,
) -> None:
    for said in pool.run(2, warned, RAGGED):
        assert len(said) == 1
        assert "does not lie on a segment border" in said[0]
        assert 'align="segment" (num_v_heads=4)' in said[0]


def test_op_says_nothing_where_the_cuts_keep_the_contract(pool: RankPool) -> None:
    assert pool.run(2, warned, ALIGNED) == [[], []]
