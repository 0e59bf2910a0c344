"""When walks are taken in halves; that bits do not tell: tests/kernels/gpu/test_hopper.py."""

import random

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


def test_a_span_of_short_walks_is_that_of_the_place_that_takes_the_longest_in_turn():
    assert halves.span([10, 1], copies=2, places=4) == 10
    assert halves.span([10, 10, 10], copies=1, places=2) == 20
    assert halves.span([8, 8, 8, 7], copies=3, places=4) == 8 + 8 + 8
    assert halves.span([4, 3, 3, 3, 3], copies=1, places=3) == 4 + 3
    assert halves.span([], copies=8, places=132) == 0


def test_a_span_of_long_walks_is_when_the_last_place_that_was_free_is_done():
    assert halves.span([128, 78], copies=96, places=132) == 128 + 78
    assert halves.span([128, 78], copies=48, places=132) == 128
    assert halves.span([64, 60], copies=96, places=132) == 64 + 60
    assert halves.span([100, 40, 40, 40], copies=1, places=2) == 120


@pytest.mark.parametrize("seed", range(20))
def test_a_span_is_what_walking_them_one_by_one_gives(seed):
    draw = random.Random(seed)
    chunks = sorted((draw.randrange(1, 200) for _ in range(draw.randrange(1, 12))), reverse=True)
    copies, places = draw.randrange(1, 70), draw.randrange(1, 140)
    walks = [each for each in chunks for _ in range(copies)]
    busy = [0] * places
    for n, each in enumerate(walks):
        place = n % places if chunks[0] <= 32 else busy.index(min(busy))
        busy[place] += each
    assert halves.span(chunks, copies, places) == max(busy)
