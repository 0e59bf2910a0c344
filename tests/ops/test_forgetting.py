"""Split documents whose gates forget within a segment, and keys that stretch what gates forget."""

import pytest
import torch

from longdelta import chunk_gated_delta_rule, reference
from longdelta.plan.chunks import segment_borders
from longdelta.testing.budgets import EAGER, HOPPER, assert_within

TOKENS, H, HV, D = 64 * 65 + 20, 1, 2, 128
NOTHING_CONTRACTS = 2e-1
"""Of bf16 operands: the errors of all chunks stay, 7.4e-2 without a split; a lost M makes 0.6."""


@pytest.mark.parametrize(
    ("gate", "length", "beta"),
    [
        (-20.0, 1.0, 0.5),  # every chunk forgets all before it
        (-0.2, 1.0, 0.5),  # some chunks do together
        ((-0.2, 0.0), 1.0, 0.04),  # in one head, hardly anything in the other
        (-0.025, 2.0, 1.0),  # a segment's gates sum to -26, its keys stretch states by more
    ],
)
def test_split_document_gives_what_the_recurrence_does(machine, gate, length, beta):
    backend, device = machine
    dtype = torch.bfloat16 if backend == "gluon" else torch.float32
    assert segment_borders(TOKENS, HV) == range(1024, TOKENS, 1024)
    q, k = (torch.randn(1, TOKENS, H, D, dtype=torch.float64) for _ in range(2))
    q, k = q / q.norm(dim=-1, keepdim=True), length * k / k.norm(dim=-1, keepdim=True)
    q, k, v = (x.to(dtype) for x in (q, k, torch.randn(1, TOKENS, HV, D)))
    g = torch.tensor(gate).expand(1, TOKENS, HV).contiguous()
    given = {"q": q, "k": k, "v": v, "g": g, "beta": torch.full_like(g, beta)}
    state = torch.randn(1, HV, D, D)
    ref = reference.recurrence(
        *(x[0].double() for x in given.values()), scale=D**-0.5, initial_state=state
    )
    moved = {name: x.to(device) for name, x in given.items()}
    o, final_state = chunk_gated_delta_rule(
        **moved, initial_state=state.to(device), output_final_state=True, backend=backend
    )
    for name, out, truth in (("o", o[0], ref.o), ("final_state", final_state, ref.final_state)):
        budget = HOPPER[name] if backend == "gluon" else EAGER[out.dtype]
        if backend == "gluon" and length > 1:
            budget = NOTHING_CONTRACTS
        assert_within(name, out, truth, budget)
