"""Partitions: every token once, near-equal, on borders where asked, equal everywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdelta.errors import InvalidInput
from longdelta.plan import Fragment, Partition, partition, segment_borders
from longdelta.plan.cuts import near_equal_cuts, snap

from .strategies import FEW_TOKENS, LENGTHS, RANKS, VALUE_HEADS, bounds_of, owners, partitions


@given(partitions(FEW_TOKENS))
def test_partition_holds_every_row_once_in_local_order(plan: Partition) -> None:
    rows = [row for rank in range(plan.ranks) for row in _rows(plan, rank)]
    assert sorted(rows) == list(range(plan.rows))
    for rank in range(plan.ranks):
        assert list(plan.fragments[rank]) == sorted(plan.fragments[rank])
        assert len(_rows(plan, rank)) == plan.local_rows(rank)
        assert plan.local_cu_seqlens(rank)[-1] == plan.tokens(rank)
    for (document, token), (rank, row) in owners(plan).items():
        assert _rows(plan, rank)[row] == plan.cu_seqlens[document] + token


def _rows(plan: Partition, rank: int) -> list[int]:
    return [row for start, stop in plan.rows_of(rank) for row in range(start, stop)]


@given(LENGTHS, RANKS)
def test_contiguous_and_zigzag_are_near_equal_when_cut_at_tokens(
    lengths: list[int], ranks: int
) -> None:
    bounds = bounds_of(lengths)
    tokens = [partition(bounds, ranks).tokens(rank) for rank in range(ranks)]
    assert tokens == sorted(tokens, reverse=True)
    assert max(tokens) - min(tokens) <= 1
    plan = partition(bounds, ranks, "zigzag")
    tokens = [plan.tokens(rank) for rank in range(ranks)]
    assert max(tokens) - min(tokens) <= 1
    plan = partition(bounds, ranks, "zigzag_per_document")
    for document, length in enumerate(lengths):
        held = [
            sum(piece.length for piece in pieces if piece.document == document)
            for pieces in plan.fragments
        ]
        assert sum(held) == length
        assert max(held) - min(held) <= 1


def test_zigzag_gives_rank_r_the_rth_piece_from_each_end() -> None:
    plan = partition([0, 23], 3, "zigzag")
    assert [plan.rows_of(rank) for rank in range(3)] == [
        ((0, 4), (20, 23)),
        ((4, 8), (16, 20)),
        ((8, 16),),
    ]


def test_partition_joins_neighbours_of_a_document_on_one_rank() -> None:
    pieces = [[(0, 0, 4), (0, 4, 2)], [(0, 8, 2), (0, 6, 2)]]
    plan = partition([0, 10], 2, "fragments", fragments=pieces)
    assert plan.fragments == ((Fragment(0, 0, 6),), (Fragment(0, 6, 4),))


@given(partitions(), VALUE_HEADS)
def test_keeps_contract_exactly_when_every_cut_is_a_border(
    plan: Partition, heads: int | None
) -> None:
    cuts = [(p.document, p.offset) for held in plan.fragments for p in held if p.offset]
    on_border = [
        offset in list(segment_borders(plan.document_tokens(document), heads))
        for document, offset in cuts
    ]
    assert plan.keeps_contract(heads) == all(on_border)
    if plan.align == "segment":
        assert plan.keeps_contract(plan.num_v_heads)
        if plan.num_v_heads is None:
            assert plan.keeps_contract(2)
            assert plan.keeps_contract(48)


@given(st.integers(0, 64 * 300), st.integers(0, 64 * 300), VALUE_HEADS)
def test_snap_finds_the_nearest_border_or_end(a: int, b: int, heads: int | None) -> None:
    offset, tokens = min(a, b), max(a, b)
    allowed = [0, *segment_borders(tokens, heads), tokens]
    assert snap(offset, tokens, heads) == min(allowed, key=lambda cut: (abs(cut - offset), cut))


def test_snap_takes_the_lower_of_two_borders_at_equal_distance() -> None:
    assert [snap(offset, 1500, 2) for offset in (256, 257, 768, 1262, 1263)] == [
        0,
        512,
        512,
        1024,
        1500,
    ]


@given(st.integers(0, 50), st.integers(1, 9))
def test_near_equal_cuts_give_the_first_parts_one_more(total: int, parts: int) -> None:
    cuts = near_equal_cuts(total, parts)
    sizes = [stop - start for start, stop in pairwise(cuts)]
    assert sizes == [total // parts + (part < total % parts) for part in range(parts)]


@given(partitions(FEW_TOKENS))
def test_starts_and_ends_name_each_document_once_in_order(plan: Partition) -> None:
    held = owners(plan)
    starts = {doc: rank for rank in range(plan.ranks) for doc in plan.starts(rank)}
    ends = {doc: rank for rank in range(plan.ranks) for doc in plan.ends(rank)}
    assert sum(len(plan.starts(rank)) for rank in range(plan.ranks)) == plan.documents
    assert sum(len(plan.ends(rank)) for rank in range(plan.ranks)) == plan.documents
    before = 0
    for document in range(plan.documents):
        tokens = plan.document_tokens(document)
        if tokens:
            assert starts[document] == held[document, 0][0]
            before = held[document, tokens - 1][0]
            assert ends[document] == before
        else:  # the rank of the token before it, else rank 0
            assert starts[document] == ends[document] == before


@given(partitions())
def test_partition_round_trips_through_json_with_its_hash(plan: Partition) -> None:
    again = Partition.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.digest() == plan.digest()


@given(partitions(), partitions())
def test_digests_are_equal_exactly_when_partitions_are(a: Partition, b: Partition) -> None:
    assert (a.digest() == b.digest()) == (a == b)


def test_digest_is_the_one_that_other_processes_and_versions_have() -> None:
    plan = partition([0, 700, 9000], 3, "balanced", align="segment")
    assert plan.digest() == "3e4144bcc1ba200775cb198754ea896d64aa16119b4d90ae4eccc8e886a48fa2"


def test_from_json_refuses_fragments_that_leave_a_gap() -> None:
    text = partition([0, 6], 2).to_json().replace("[0,3,3]", "[0,4,2]")
    with pytest.raises(InvalidInput, match=r"fragments\[1\]\[0\] = \(0, 4, 2\) leaves a gap"):
        Partition.from_json(text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", "text must be what to_json wrote, got no JSON"),
        (None, "{}", r"text must be what to_json wrote, with \['align', .* got \[\]"),
        (None, "[]", "text must be what to_json wrote, .* got list"),
        (None, "[" * 100_000, "text must be what to_json wrote, got no JSON"),
        (
            '"rows":6',
            '"rows":5',
            r"rows must be an integer of at least cu_seqlens\[-1\] = 6, got 5",
        ),
        ('"rows":6', '"rows":NaN', "rows must be an integer .* got nan"),
        ('"cu_seqlens":[0', '"cu_seqlens":[1', "cu_seqlens must be integers that start at 0"),
        ('"cu_seqlens":[0,6]', '"cu_seqlens":null', "cu_seqlens must be integers .* got None"),
        ("contiguous", "spiral", "layout must be one of"),
        ('"align":"token"', '"align":1', "align must be one of token, segment, got 1"),
        ('"align":"token"', '"align":"segment"', "must start on a segment border"),
        ('"num_v_heads":null', '"num_v_heads":0', "num_v_heads must be an integer of at least 1"),
        ("[[[0,0,3]],[[0,3,3]]]", "[]", r"fragments must hold one list per rank, got \[\]"),
        ("[0,0,3]", "[0,0,3.5]", r"fragments\[0\]\[0\] must be \(document, offset, length\)"),
        ("[[0,0,3]]", "3", r"fragments\[0\] must be a list of triples, got 3"),
        ("[0,0,3]", "[0,0,1],[0,1,2]", "fragments in another order"),
    ],
)
def test_from_json_refuses_what_partition_would(old: str | None, new: str, message: str) -> None:
    text = partition([0, 6], 2).to_json()
    assert not old or old in text
    with pytest.raises(InvalidInput, match=message):
        Partition.from_json(text.replace(old, new) if old else new)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_partition_takes_arrays_tensors_and_their_numbers(kind: torch.dtype) -> None:
    expected = partition([0, 4, 9], 2, num_v_heads=2, rows=10)
    bounds = torch.tensor([0, 4, 9, 2, 10], dtype=kind)
    for numbers in (bounds, bounds.numpy()):
        options = {"num_v_heads": numbers[3], "rows": numbers[4]}
        for given_bounds in (numbers[:3], list(numbers[:3]), numbers[:3].tolist()):
            plan = partition(given_bounds, numbers[3], **options)
            assert plan == expected
            assert plan.digest() == expected.digest()
    pieces = [[(0, 0, 4)], [(1, 0, 5)]]
    explicit = partition([0, 4, 9], 2, "fragments", fragments=pieces)
    assert partition([0, 4, 9], 2, "fragments", fragments=torch.tensor(pieces)) == explicit


def test_printed_partition_names_what_each_rank_holds() -> None:
    lines = str(partition([0, 6, 6, 10], 3, rows=12)).splitlines()
    assert lines[0] == "contiguous partition, 3 ranks, align=token, 3 documents, 10 tokens, 12 rows"
    assert lines[1].split() == ["rank", "0", "4", "tokens", "0[0:4]"]
    assert lines[2].split() == ["rank", "1", "3", "tokens", "0[4:6],", "1[0:0],", "2[0:1]"]


@given(st.lists(st.integers(1, 511), min_size=8, max_size=30), RANKS)
@settings(max_examples=30)
def test_short_documents_spread_over_ranks_when_zigzag_may_not_cut_them(
    lengths: list[int], ranks: int
) -> None:
    plan = partition(bounds_of(lengths), ranks, "zigzag_per_document", align="segment")
    tokens = [plan.tokens(rank) for rank in range(ranks)]
    assert max(tokens) - min(tokens) <= max(lengths)


@pytest.mark.parametrize(
    ("fragments", "message"),
    [
        ([[(0, 0, 5)]], r"one list per rank \(2\), got 1"),
        ([[(0, 0, 5)], [(0, 6, 4)]], r"fragments\[1\]\[0\] = \(0, 6, 4\) leaves a gap"),
        ([[(0, 0, 5)], [(0, 4, 6)]], r"fragments\[1\]\[0\] = \(0, 4, 6\) overlaps"),
        ([[(0, 0, 5)], [(0, 5, 6)]], r"fragments\[1\]\[0\] = \(0, 5, 6\) must be a non-empty part"),
        ([[(0, 0, 10)], [(0, 10, 0)]], r"fragments\[1\]\[0\] = \(0, 10, 0\) must be a non-empty"),
        ([[(0, 0, 10)], [(1, 0, 1)]], r"fragments\[1\]\[0\] = \(1, 0, 1\): document must be"),
        ([[(0, 0, 5)], []], r"of the 10 tokens of document 0 they hold 5"),
        (5, r"one list per rank \(2\), got 5"),
        ([None, []], r"fragments\[0\] must be a list of triples, got None"),
        ([[7], []], r"fragments\[0\]\[0\] must be \(document, offset, length\), got 7"),
        ([[(0, 0, 1.5)], []], r"fragments\[0\]\[0\] must be .* got \(0, 0, 1.5\)"),
        ([[(0, 0)], []], r"fragments\[0\]\[0\] must be \(document, offset, length\), got \(0, 0\)"),
    ],
)
def test_partition_names_the_fragment_at_fault(fragments: list, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        partition([0, 10], 2, "fragments", fragments=fragments)


def test_partition_refuses_explicit_cuts_off_a_border_with_align_segment() -> None:
    pieces = [[(0, 0, 500)], [(0, 500, 524)]]
    with pytest.raises(InvalidInput, match=r"fragments\[1\] of document 0 .* got offset 500"):
        partition([0, 1024], 2, "fragments", align="segment", num_v_heads=2, fragments=pieces)
    pieces = [[(0, 0, 512)], [(0, 512, 512)]]
    plan = partition([0, 1024], 2, "fragments", align="segment", num_v_heads=2, fragments=pieces)
    assert plan.keeps_contract(2)
    assert not plan.keeps_contract(48)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seqlens": [1, 4]}, "cu_seqlens must be integers that start at 0"),
        ({"cu_seqlens": []}, "cu_seqlens must be integers that start at 0"),
        ({"cu_seqlens": [0, 4.0]}, "cu_seqlens must be integers that start at 0"),
        ({"cu_seqlens": [0, 4, 3]}, "got 4 then 3 at position 2"),
        ({"ranks": 0}, "ranks must be an integer of at least 1, got 0"),
        ({"layout": "spiral"}, "layout must be one of contiguous, .*, got 'spiral'"),
        ({"layout": "fragments"}, "got layout='fragments' without fragments"),
        ({"fragments": [[(0, 0, 4)], []]}, "got layout='contiguous' with fragments"),
        ({"align": "chunk"}, "align must be one of token, segment, got 'chunk'"),
        ({"num_v_heads": 0}, "num_v_heads must be an integer of at least 1, got 0"),
        ({"rows": 3}, r"rows must be an integer of at least cu_seqlens\[-1\] = 4, got 3"),
        ({"rows": 4.5}, "rows must be an integer .* got 4.5"),
        ({"rows": float("nan")}, "rows must be an integer .* got nan"),
        ({"rows": True}, "rows must be an integer .* got True"),
        ({"rows": "x"}, "rows must be an integer .* got 'x'"),
        ({"cu_seqlens": 5}, "cu_seqlens must be integers that start at 0, got 5"),
        ({"cu_seqlens": None}, "cu_seqlens must be integers that start at 0, got None"),
        ({"cu_seqlens": [0, True]}, "cu_seqlens must be integers that start at 0"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, "cu_seqlens must be integers that start at 0"),
        ({"cu_seqlens": torch.tensor([[0, 4]])}, "cu_seqlens must be integers that start at 0"),
        ({"cu_seqlens": torch.tensor(4)}, "cu_seqlens must be integers that start at 0"),
        ({"cu_seqlens": torch.zeros(2, device="meta")}, "cu_seqlens must be integers that start"),
        ({"ranks": 2.0}, "ranks must be an integer of at least 1, got 2.0"),
        ({"num_v_heads": "2"}, "num_v_heads must be an integer of at least 1, got '2'"),
    ],
)
def test_partition_names_the_argument_that_is_wrong(arguments: dict, message: str) -> None:
    given_arguments = {"cu_seqlens": [0, 4], "ranks": 2, **arguments}
    with pytest.raises(InvalidInput, match=message):
        partition(**given_arguments)
