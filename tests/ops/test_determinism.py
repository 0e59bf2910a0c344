"""The promise of `deterministic=True`, bit by bit."""

import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import longdelta
from longdelta import arguments
from longdelta.testing.workloads import (
    BITS_BY_DOCUMENT,
    LEAVES,
    MACHINES,
    NAMED,
    Cotangents,
    Inputs,
    Machine,
    Results,
    Workload,
    assert_bitwise,
    assert_results,
    evaluate,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

POOL = Workload(
    lengths=(1, 63, 64, 65, 200, 700, 1300), gates="slow", betas="small", H=2, HV=4, tail=0
)
"""Documents with no, one and several borders; each packing below takes some of them."""
FULL = [4] * 62 + [6] + [4] * 62
"""Enough work beside the long document for the fast mode to leave it whole."""


def packed(
    documents: list[int], dtype: torch.dtype, tail: int, machine: Machine = MACHINES[0]
) -> tuple[Inputs, Cotangents]:
    """These documents of the pool, in this order, and some rows of none."""
    work, dtype = machine.fit(POOL), machine.dtype(dtype)
    inputs, cotangents = work.inputs(dtype), work.cotangents(dtype)
    rows = [torch.arange(POOL.offsets[n], POOL.offsets[n + 1]) for n in documents]
    rows = torch.cat([*rows, torch.zeros(tail, dtype=torch.int64)])
    offsets = [0, *accumulate(POOL.lengths[n] for n in documents)]
    taken = Inputs(
        *(getattr(inputs, name)[:, rows] for name in LEAVES[:5]),
        inputs.initial_state[documents],
        torch.tensor(offsets),
    )
    return taken, Cotangents(cotangents.do[:, rows], cotangents.d_final_state[documents])


def document_of(found: Results, offsets: torch.Tensor, index: int) -> Results:
    """The part of the results that belongs to one document."""
    rows = slice(int(offsets[index]), int(offsets[index + 1]))
    return Results(
        *(
            x[index : index + 1] if name.endswith("state") else x[:, rows]
            for name, x in found._asdict().items()
        )
    )


_alone: dict[tuple[int, torch.dtype], Results] = {}


def alone(document: int, dtype: torch.dtype) -> Results:
    """A document's results in a batch of its own."""
    if (document, dtype) not in _alone:
        _alone[document, dtype] = evaluate(*packed([document], dtype, 0))
    return _alone[document, dtype]


@DTYPES
@settings(max_examples=30)
@given(documents=st.lists(st.integers(0, 6), min_size=1, max_size=5), tail=st.integers(0, 70))
def test_a_documents_bits_do_not_depend_on_what_else_is_packed(dtype, documents, tail):
    inputs, cotangents = packed(documents, dtype, tail)
    found = evaluate(inputs, cotangents)
    for index, document in enumerate(documents):
        part = document_of(found, inputs.cu_seqlens, index)
        assert_bitwise(part, alone(document, dtype))


@DTYPES
@pytest.mark.parametrize("machine", BITS_BY_DOCUMENT, indirect=True, ids=str)
def test_a_long_document_keeps_its_bits_among_forty_short_ones(machine, dtype):
    # Enough tasks that the fast mode would no longer split the long document.
    documents = [1] * 20 + [6] + [2] * 20
    inputs, cotangents = packed(documents, dtype, 3, machine)
    part = document_of(machine.evaluate(inputs, cotangents), inputs.cu_seqlens, 20)
    one = machine.evaluate(*packed([6], dtype, 0, machine))
    assert_bitwise(part, one)


@DTYPES
@pytest.mark.parametrize("machine", BITS_BY_DOCUMENT, indirect=True, ids=str)
def test_every_document_of_a_batch_has_the_bits_that_it_has_alone(machine, dtype):
    inputs, cotangents = packed([5, 0, 6, 2, 3, 4, 1], dtype, 5, machine)
    found = machine.evaluate(inputs, cotangents)
    for index, document in enumerate([5, 0, 6, 2, 3, 4, 1]):
        one = machine.evaluate(*packed([document], dtype, 0, machine))
        assert_bitwise(document_of(found, inputs.cu_seqlens, index), one)


@DTYPES
def test_bits_do_not_depend_on_the_number_of_threads(dtype):
    # K and V large enough that torch would share a product among threads.
    work = Workload(lengths=(300, 700), H=2, HV=4, K=64, V=64, tail=0)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(evaluate(work.inputs(dtype), work.cotangents(dtype)))
    assert_bitwise(*found)


@DTYPES
@pytest.mark.parametrize("name", ["split_groups", "split_model", "mild"])
def test_bits_do_not_depend_on_the_run(machine, dtype, name):
    assert_bitwise(*(machine.run(NAMED[name], dtype) for _ in range(2)))


def test_bits_do_not_depend_on_the_process():
    code = (
        "import sys; sys.path.insert(0, {path!r})\n"
        "import torch; torch.set_num_threads({threads})\n"
        "from longdelta.testing.workloads import NAMED, evaluate\n"
        "w = NAMED['split_groups']\n"
        "r = evaluate(w.inputs(torch.float32), w.cotangents(torch.float32))\n"
        "print([x.double().sum().item().hex() for x in r])"
    )
    path = str(Path(longdelta.__file__).parents[1])
    found = {
        subprocess.run(
            [sys.executable, "-c", code.format(threads=threads, path=path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in (1, 2)
    }
    assert len(found) == 1
    assert "0x" in found.pop()


@DTYPES
@pytest.mark.parametrize("name", ["split_groups", "split_reset", "mild"])
def test_bits_do_not_depend_on_the_save_mode(machine, dtype, name):
    modes = ("none", "light", "full", "auto")
    found = [machine.run(NAMED[name], dtype, save=mode) for mode in modes]
    for other in found[1:]:
        assert_bitwise(other, found[0])


@DTYPES
def test_bits_do_not_depend_on_whether_a_gradient_is_asked_for(machine, dtype):
    work = NAMED["split_groups"]
    inputs, cotangents = machine.inputs(work, dtype), machine.cotangents(work, dtype)
    whole = machine.evaluate(inputs, cotangents)
    for leaves in ((), ("v",), ("q", "g"), ("initial_state",)):
        assert_bitwise(machine.evaluate(inputs, cotangents, leaves=leaves), whole)
    without_state = machine.evaluate(
        inputs, cotangents._replace(d_final_state=None), output_final_state=False
    )
    assert torch.equal(without_state.o, whole.o)


def test_the_fast_mode_is_run_to_run_exact_and_within_rounding_of_the_deterministic_one(machine):
    inputs, cotangents = packed(FULL, torch.float32, 0, machine)
    fast = [machine.evaluate(inputs, cotangents, deterministic=False) for _ in range(2)]
    assert_bitwise(*fast)
    exact = machine.evaluate(inputs, cotangents)
    assert not torch.equal(fast[0].o, exact.o)
    assert_results(fast[0], exact, machine.budgets(POOL))


def test_use_deterministic_algorithms_overrules_the_fast_mode_with_one_warning(monkeypatch):
    monkeypatch.setattr(arguments, "_said", set())
    inputs, cotangents = packed(FULL, torch.float32, 0)
    exact = evaluate(inputs, cotangents)
    torch.use_deterministic_algorithms(True)
    with pytest.warns(UserWarning, match="deterministic=False is overruled"):
        out = evaluate(inputs, cotangents, deterministic=False)
    assert_bitwise(out, exact)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_bitwise(evaluate(inputs, cotangents, deterministic=False), exact)


@pytest.mark.parametrize("save", ["none", "full"])
def test_the_op_runs_under_use_deterministic_algorithms_with_the_same_bits(machine, save):
    # torch then fills new memory with NaN: whatever was left unwritten would show.
    work = replace(NAMED["split_groups"], tail=70)
    inputs, cotangents = machine.inputs(work), machine.cotangents(work)
    before = machine.evaluate(inputs, cotangents, save=save)
    # On a GPU torch would raise for matrix products unless cuBLAS is configured from outside.
    torch.use_deterministic_algorithms(True, warn_only=machine.device == "cuda")
    assert_bitwise(machine.evaluate(inputs, cotangents, save=save), before)
