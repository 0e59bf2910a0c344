"""How documents are cut into segments, in either mode."""

from itertools import accumulate

import pytest

from longdelta.plan.chunks import Walk, walk


def cut(lengths: list[int], HV: int, *, deterministic: bool) -> Walk:
    return walk([0, *accumulate(lengths)], HV, deterministic=deterministic)


@pytest.mark.parametrize(
    ("lengths", "HV"),
    [
        ([34000, 29000, 26000, 10000, 7000], 48),  # whole, the long ones would leave gaps
        ([8192], 8),
        ([32768], 32),
        ([16] * 2050, 32),
        ([0, 0, 5], 4),
        ([0], 4),
    ],
)
def test_the_fast_mode_cuts_as_the_deterministic_one_where_that_ends_no_later(lengths, HV):
    assert cut(lengths, HV, deterministic=False) == cut(lengths, HV, deterministic=True)


@pytest.mark.parametrize(
    ("lengths", "HV", "fast", "deterministic"),
    [
        ([2048], 32, (8, 3), (32, 0)),  # its bits may tell that it comes alone
        ([4096], 64, (32, 1), (64, 0)),
        ([9000, 20000, 3000, 700], 16, (64, 6), (64, 10)),
        ([9920, *[4000] * 12], 16, (128, 1), (32, 40)),
        ([9920, *[4000] * 20], 16, (155, 0), (32, 64)),  # one that fits into a device's share
        ([20000, *[640] * 100], 64, (313, 0), (128, 2)),  # among many walks
    ],
)
def test_the_fast_mode_cuts_by_what_a_document_is_packed_with(lengths, HV, fast, deterministic):
    walks = [cut(lengths, HV, deterministic=mode) for mode in (False, True)]
    assert [(max(s.chunks for s in w.segments), w.borders) for w in walks] == [fast, deterministic]
