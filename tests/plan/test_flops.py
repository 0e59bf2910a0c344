"""Costs of stages against the figures of the design: products per chunk and value head."""

from __future__ import annotations

import pytest

from longdelta.plan import Heads, stage_costs, walk

B, M, T = 2 * 64 * 128 * 128, 2 * 64 * 64 * 128, 2 * 64**3


def _flops(chunks: int, heads: Heads, save: str = "light") -> dict[tuple[str, str], int]:
    costs = stage_costs(walk([0, 64 * chunks], heads.HV), heads, save=save)
    return {(cost.direction, cost.stage): cost.flops for cost in costs}


@pytest.mark.parametrize("group", [1, 3])
def test_forward_of_an_undivided_document_makes_key_products_once_per_head(group: int) -> None:
    flops = _flops(8, Heads(2, 2 * group))
    per_chunk = sum(v for (way, _), v in flops.items() if way == "forward") // (8 * 2 * group)
    assert per_chunk == 3 * B + 2 * M + 2 * M // group + T // 2


def test_middle_segments_add_a_transition_and_the_last_needs_no_summary() -> None:
    flops = _flops(20, Heads(6, 6))  # 8 chunks, then 8, then 4
    assert flops["forward", "summarize"] == 6 * (8 * (2 * B + M) + 8 * (4 * B + M))
    assert flops["forward", "fold"] == 6 * 2 * 128**3
    assert flops["backward", "adjoint_summarize"] == 6 * 12 * (3 * B + 2 * M + M)


def test_backward_makes_again_only_what_was_not_saved() -> None:
    stages = {
        save: [stage for way, stage in _flops(20, Heads(6, 6), save) if way == "backward"]
        for save in ("none", "light", "full")
    }
    adjoint = ["adjoint_summarize", "adjoint_fold", "adjoint_scan", "gradients"]
    assert stages["full"] == adjoint
    assert stages["light"] == ["prepare", "tapes", *adjoint]
    assert stages["none"] == ["prepare", "summarize", "fold", "tapes", *adjoint]


def test_traffic_of_scan_counts_each_tensor_once() -> None:
    costs = stage_costs(walk([0, 65], 6), Heads(2, 6))
    (scan,) = [cost for cost in costs if cost.stage == "scan"]
    per_token = (2 * 2 + 6 * 2) * 128 * 2 + 6 * 4  # q, k, v and o in bf16, beta in fp32
    assert scan.bytes_moved == 65 * per_token + 2 * 6 * (64 + 64 * 64) * 4
