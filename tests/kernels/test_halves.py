"""When walks are taken in halves; that bits do not tell: tests/kernels/gpu/test_hopper.py."""

import pytest
import torch

from longdelta.kernels.gluon import halves
from longdelta.kernels.gluon.tables import DeviceTables
from longdelta.kernels.stages import Tables
from longdelta.plan.chunks import walk
from longdelta.runtime import launch


@pytest.mark.parametrize(
    ("lengths", "HV", "groups"),
    [
        ([2048], 32, 1),  # 32 walks of 32 chunks
        ([4096], 64, 1),
        ([4200, 2000, 1500, 492], 32, 1),  # as many walks as places, but one document holds them up
        ([8192], 8, 1),  # 64 segments of 16 chunks
        ([8192], 48, 2),  # 96 walks, and halves would need two rounds
        ([32768], 32, 2),
        ([16] * 2050, 8, 2),
        ([1] * 16, 8, 2),  # 128 walks of one chunk
        ([], 8, 2),
    ],
)
def test_walks_go_in_halves_where_that_ends_sooner(monkeypatch, lengths, HV, groups):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    tables = DeviceTables(Tables(walk(offsets, HV), torch.device("cpu")))
    assert halves.groups_of(tables, HV) == groups


def test_a_span_is_what_the_longest_the_rounds_or_all_walks_need():
    assert halves.span([10, 1], copies=2, places=4) == 10
    assert halves.span([10, 10, 10], copies=1, places=2) == 20
    assert halves.span([8, 8, 8, 7], copies=3, places=4) == 24
    assert halves.span([4, 3, 3, 3, 3], copies=1, places=3) == 6
    assert halves.span([], copies=8, places=132) == 0
