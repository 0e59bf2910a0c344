"""Groups of a DeviceMesh: two replicas of two ranks each, none in the other's way."""

from __future__ import annotations

import pytest
import torch

from longdelta.testing.ranks import RankPool
from longdelta.testing.workloads import Workload, assert_bitwise, evaluate

from .rank_mesh import on_mesh, replicas, whole_mesh
from .whole import plan_of, whole


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_op_on_the_groups_of_a_mesh_has_one_devices_bits_per_replica(
    pool: RankPool, layout: str
) -> None:
    work = Workload(lengths=(1100, 0, 70, 600), K=8, V=8)
    build = {"layout": layout, "align": "segment", "num_v_heads": work.HV}
    answers = pool.run(4, on_mesh, work, build)
    assert [replica for replica, _ in answers] == [0, 0, 1, 1]
    for replica, mine in enumerate(replicas(work)):
        plan = plan_of(mine, 2, **build)
        results = whole(plan, [found for _, found in answers[2 * replica : 2 * replica + 2]])
        single = evaluate(mine.inputs(torch.float32), mine.cotangents(torch.float32))
        assert_bitwise(results, single)


def test_context_refuses_a_mesh_of_two_dimensions(pool: RankPool) -> None:
    for message in pool.run(4, whole_mesh):
        assert "a mesh of one dimension, got 2" in message
        assert 'mesh.get_group("cp")' in message
