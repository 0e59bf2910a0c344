"""Rows to ranks, back, and from layout to layout, with the gradients of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longdelta.distributed import build_cp_context
from longdelta.errors import InvalidInput
from longdelta.testing.ranks import RankPool

from .rank_shards import BATCH, ROWS, converted, first_of, refusals, round_trip

RANKS = pytest.mark.parametrize("ranks", [1, 2, 3, 4])
LAYOUTS = ["contiguous", "zigzag", "zigzag_per_document", "balanced"]


def source() -> tuple[Tensor, Tensor]:
    """Values and cotangents: small integers, whose sums are exact."""
    random = torch.Generator().manual_seed(7)
    return torch.randint(-9, 10, (2, 1, ROWS, 3), generator=random).double().unbind()


@RANKS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_unshard_undoes_shard_and_their_gradients_are_each_others_adjoint(
    pool: RankPool, ranks: int, layout: str
) -> None:
    x, cotangent = source()
    answers = pool.run(ranks, round_trip, layout, x, cotangent)
    pieces = [answer["piece"] for answer in answers]
    assert sum(piece.shape[1] for piece in pieces) == ROWS
    for rank, answer in enumerate(answers):
        assert torch.equal(answer["whole"], x)
        # Every rank adds its loss: rank r's weighs r + 1.
        weight = sum(range(1, ranks + 1))
        rows = answer["rows"]
        assert torch.equal(answer["d_piece"], weight * cotangent[:, rows])
        # Of shard: the rows of this rank, the other rows zero.
        expected = torch.zeros_like(x)
        expected[:, rows] = cotangent[:, rows] * (rank + 1)
        assert torch.equal(answer["d_whole"], expected)


@RANKS
def test_convert_moves_rows_and_gradients_between_layouts(pool: RankPool, ranks: int) -> None:
    x, cotangent = source()
    for answer in pool.run(ranks, converted, "zigzag", "contiguous", x, cotangent):
        assert torch.equal(answer["moved"], answer["there"])
        assert torch.equal(answer["gradient"], answer["cotangent_here"])
        assert torch.equal(answer["second"], 2 * answer["cotangent_here"].square())


def test_convert_sends_only_what_changes_rank(pool: RankPool) -> None:
    x, cotangent = source()
    for answer in pool.run(3, converted, "balanced", "balanced", x, cotangent):
        assert [(each.sent, each.received) for each in answer["log"]] == [(0, 0)] * 2
    answers = pool.run(3, converted, "zigzag", "contiguous", x, cotangent)
    for at in range(2):
        assert sum(answer["log"][at].sent for answer in answers) == sum(
            answer["log"][at].received for answer in answers
        )
        assert any(answer["log"][at].sent for answer in answers)


def test_shard_gives_a_padded_row_order_that_frameworks_can_undo(pool: RankPool) -> None:
    """Eight tokens on two ranks of a zigzag: ranks own 0 1 6 7 and 2 3 4 5."""
    assert pool.run(2, first_of, [0, 8], "zigzag") == [[0, 1, 6, 7], [2, 3, 4, 5]]
    # Two documents are cut each by itself, not as one stream.
    assert pool.run(2, first_of, [0, 8, 12], "zigzag_per_document") == [
        [0, 1, 6, 7, 8, 11],
        [2, 3, 4, 5, 9, 10],
    ]


def test_shards_refuse_other_rows_another_batch_and_another_group(pool: RankPool) -> None:
    for rank, messages in enumerate(pool.run(2, refusals)):
        assert f"shard: x must have {ROWS} rows along dim 1" in messages["shard"]
        assert "unshard: x must have" in messages["unshard"]
        assert "same cu_seqlens" in messages["another batch"]
        assert f"must have this context's ranks [0, 1], got [{rank}]" in messages["another group"]


def test_one_process_without_a_group_shards_and_converts_by_copying() -> None:
    x, cotangent = source()
    context: Any = build_cp_context(BATCH, rows=ROWS)
    leaf = x.clone().requires_grad_()
    whole = context.unshard(context.convert(context.shard(leaf), context))
    assert torch.equal(whole, x)
    assert torch.equal(torch.autograd.grad(whole, leaf, cotangent)[0], cotangent)
    with pytest.raises(InvalidInput, match=r"x must have 26 rows along dim 1; got \[1, 25, 3\]"):
        context.shard(x[:, 1:])
