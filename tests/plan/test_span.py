"""When the last of the places that take walks is done."""

import random

import pytest

from longdelta.plan.span import span


def test_a_span_of_short_walks_is_that_of_the_place_that_takes_the_longest_in_turn():
    assert span([10, 1], copies=2, places=4, in_turn=True) == 10
    assert span([10, 10, 10], copies=1, places=2, in_turn=True) == 20
    assert span([8, 8, 8, 7], copies=3, places=4, in_turn=True) == 8 + 8 + 8
    assert span([4, 3, 3, 3, 3], copies=1, places=3, in_turn=True) == 4 + 3
    assert span([], copies=8, places=132, in_turn=True) == 0


def test_a_span_of_long_walks_is_when_the_last_place_that_was_free_is_done():
    assert span([128, 78], copies=96, places=132) == 128 + 78
    assert span([128, 78], copies=48, places=132) == 128
    assert span([64, 60], copies=96, places=132) == 64 + 60
    assert span([100, 40, 40, 40], copies=1, places=2) == 120


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_span_is_what_walking_them_one_by_one_gives(seed, in_turn):
    draw = random.Random(seed)
    chunks = sorted((draw.randrange(1, 200) for _ in range(draw.randrange(1, 12))), reverse=True)
    copies, places = draw.randrange(1, 70), draw.randrange(1, 140)
    walks = [each for each in chunks for _ in range(copies)]
    busy = [0] * places
    for n, each in enumerate(walks):
        busy[n % places if in_turn else busy.index(min(busy))] += each
    assert span(chunks, copies, places, in_turn=in_turn) == max(busy)
