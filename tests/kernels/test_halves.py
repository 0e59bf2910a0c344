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
        ([13165], 48, 2),  # 128 and 78 chunks: halves of the second would wait for the first's
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
