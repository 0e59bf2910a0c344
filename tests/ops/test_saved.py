"""What a call keeps and takes, to the byte."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longdelta import bytes_needed, gdn_forward
from longdelta.kernels import eager
from longdelta.ops import saved as saved_module
from longdelta.ops.saved import Sizes
from longdelta.plan.chunks import walk
from longdelta.plan.tensors import ACTIVATED, Counts, saved_bytes, workspace_bytes
from longdelta.testing.workloads import NAMED, Workload, evaluate

WORK = NAMED["split_groups"]
DIMS = {"HV": WORK.HV, "K": WORK.K, "V": WORK.V}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("save", ["none", "light", "full"])
def test_the_saved_tensor_has_the_bytes_that_the_plan_states(save, dtype):
    x = WORK.inputs(dtype)
    packed = (x.q, x.k, x.v, x.g, x.beta)
    found = gdn_forward(*packed, cu_seqlens=x.cu_seqlens, save=save).saved.tensor
    name = str(dtype).removeprefix("torch.")
    stated = saved_bytes(save, Counts.of(walk(WORK.offsets, WORK.HV)), dtype=name, **DIMS)
    assert found.numel() * found.element_size() == stated
    assert (stated == 0) == (save == "none")


@pytest.mark.parametrize("save", ["light", "full"])
def test_short_documents_keep_no_room_for_borders_outside_of_a_compiled_graph(save):
    work = Workload(lengths=(64,) * 9, H=2, HV=4, K=16, V=16, tail=0)
    x = work.inputs(torch.float32)
    packed = (x.q, x.k, x.v, x.g, x.beta)
    found = gdn_forward(*packed, cu_seqlens=x.cu_seqlens, save=save).saved.tensor
    heads = {"num_heads": 2, "num_v_heads": 4, "head_k_dim": 16, "head_v_dim": 16}
    about = heads | {"dtype": "float32", "save": save}
    assert found.numel() == bytes_needed(work.offsets, **about).saved
    assert found.numel() < bytes_needed(work.offsets, **about, compiled=True).saved
    assert (found.numel() == 0) == (save == "light")


@pytest.fixture
def buffers(monkeypatch) -> list[int]:
    """Bytes of every workspace that a call allocates."""
    found: list[int] = []
    original = Sizes.new

    def new(self, names, device):
        views = original(self, names, device)
        found.append(self._layout(names)[1])
        for view in views.values():
            assert view.untyped_storage().nbytes() == found[-1]
        return views

    monkeypatch.setattr(saved_module.Sizes, "new", new)
    return found


@pytest.mark.parametrize("save", ["none", "light", "full"])
def test_the_workspace_has_the_bytes_that_the_plan_states(buffers, save):
    evaluate(WORK.inputs(torch.bfloat16), WORK.cotangents(torch.bfloat16), save=save)
    counts = Counts.of(walk(WORK.offsets, WORK.HV, rows=WORK.rows))
    assert counts.maps > 0
    assert tuple(buffers) == workspace_bytes(counts, save=save, **DIMS)


def test_raw_inputs_are_made_ready_in_the_workspace(buffers):
    inputs = WORK.inputs(torch.bfloat16)
    inputs = inputs.with_(g=inputs.g.bfloat16())
    options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    evaluate(inputs, WORK.cotangents(torch.bfloat16), save="light", **options)
    counts = Counts.of(walk(WORK.offsets, WORK.HV, rows=WORK.rows))
    assert tuple(buffers) == workspace_bytes(
        counts, save="light", T=WORK.rows, H=WORK.H, activated=ACTIVATED, **DIMS
    )


@pytest.mark.parametrize("stage", ["prepare", "scan"])
def test_ready_inputs_reach_the_stages_in_place(monkeypatch, stage):
    inputs, addresses = WORK.inputs(torch.bfloat16), []
    original = getattr(eager, stage)

    def seen(*arguments, **outputs):
        addresses.extend(x.data_ptr() for x in arguments if isinstance(x, torch.Tensor))
        original(*arguments, **outputs)

    monkeypatch.setattr(eager, stage, seen)
    x = inputs
    gdn_forward(x.q, x.k, x.v, x.g, x.beta, cu_seqlens=x.cu_seqlens)
    names = {"prepare": ("k", "g", "beta"), "scan": ("q", "k", "v", "beta")}[stage]
    assert addresses[: len(names)] == [getattr(x, name).data_ptr() for name in names]


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns, and the sum of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
                self.total += x.numel()
        return result


def measured(tokens: int) -> Largest:
    work = Workload(lengths=(tokens,), gates="slow", H=1, HV=1, K=8, V=8, tail=0)
    inputs, cotangents = work.inputs(torch.float32), work.cotangents(torch.float32)
    with Largest() as found:
        evaluate(inputs, cotangents, save="full")
    return found


def test_memory_grows_linearly_and_nothing_of_tokens_by_tokens_is_built():
    short, middle, long = (measured(tokens) for tokens in (1024, 2048, 4096))
    # Twice the tokens, twice the growth; not from nothing: borders are one fewer than segments.
    assert long.elements - middle.elements <= 2 * (middle.elements - short.elements)
    assert long.total <= 4.5 * short.total
    assert long.elements < 4096 * 4096 // 8


def test_views_of_a_buffer_do_not_overlap_and_start_aligned():
    counts = Counts(chunks=5, borders=2, maps=1)
    sizes = Sizes(counts, HV=3, K=5, V=7, dtype=torch.bfloat16, backend="eager")
    names = ("G", "Z", "S_border", "M")
    views = sizes.new(names, torch.device("cpu"))
    for index, view in enumerate(views.values()):
        view.fill_(index)
        assert view.storage_offset() * view.itemsize % 256 == 0
    assert [view.unique().tolist() for view in views.values()] == [[0.0], [1.0], [2.0], [3.0]]
