"""The way past Triton's launcher leads where Triton's launcher leads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="no Triton here")

import triton
from triton.backends.nvidia import driver as nvidia

from longdelta.kernels.gluon.tiles import FLAT, flat, ragged
from longdelta.runtime.driver import Tile, call_of, encode

SIGNATURE = {
    0: f"tensordesc<bf16[1, 64, 1, 128],{FLAT!r}>",
    1: f"tensordesc<bf16[64, 64],{FLAT!r}>",
    2: "*fp32",
    3: "i32",
    4: "constexpr",
}


def noted(box: list[int]) -> dict[str, Any]:
    """What a compiler notes of a descriptor."""
    return {
        "swizzle": 3,
        "elem_size": 2,
        "elem_type": 10,
        "block_size": [*box[:-1], 64],
        "fp4_padded": False,
    }


def plain(x: Any) -> Any:
    """Addresses in place of tensors."""
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    return tuple(map(plain, x)) if isinstance(x, (tuple, list)) else x


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reaches the entry in C; an encoded descriptor is what it was made of."""

    def fill(*how: Any) -> Any:
        return plain(how)

    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    monkeypatch.setattr(type(triton.runtime.driver), "active", SimpleNamespace(utils=utils))
    return []


def compiled(entered: list[Any]) -> Any:
    """A compiled kernel of SIGNATURE behind Triton's own launcher."""
    how = [noted([1, 64, 1, 128]), noted([64, 64])]

    def entry(*passed: Any) -> None:
        entered.append(plain(passed))

    run = object.__new__(nvidia.CudaLauncher)
    run.launch = nvidia.wrap_handle_tensordesc(entry, SIGNATURE, how)
    run.num_ctas, run.gsan_enabled = 1, False
    run.launch_cooperative_grid = run.launch_pdl = False
    run.global_scratch_size = run.profile_scratch_size = 0
    run.global_scratch_align = run.profile_scratch_align = 1
    if hasattr(nvidia, "annotate_arguments"):
        run.arg_annotations, run.kernel_signature = "annotations", "signature"
    metadata = SimpleNamespace(tensordesc_meta=how)
    return SimpleNamespace(run=run, function=5, packed_metadata=(4, 1, 0), metadata=metadata)


def test_both_ways_of_launching_reach_the_driver_with_what_triton_passes(entered):
    kernel = compiled(entered)
    q = torch.zeros(100, 2, 128, dtype=torch.bfloat16)[:, :1]
    z = torch.zeros(3, 64, 64, dtype=torch.bfloat16)
    moving = (ragged(q, 128), flat(z, 64, 64), torch.zeros(8))
    kernel.run(9, 1, 1, 77, 5, (4, 1, 0), None, None, None, *moving, 6, True)
    how = iter(kernel.metadata.tensordesc_meta)
    words: list[Any] = []
    for x in moving:
        words += encode(x, next(how)) if isinstance(x, Tile) else [x.data_ptr()]
    call, encoded = call_of(kernel, (6, True))
    assert encoded
    call(9, 77, words)
    bare = SimpleNamespace(run=kernel.run.__call__, function=5, packed_metadata=(4, 1, 0))
    call, encoded = call_of(bare, (6, True))
    assert not encoded
    call(9, 77, [*moving[:2], moving[2].data_ptr()])
    by_triton, direct, slow = entered
    assert direct == slow == by_triton


def test_kernel_that_needs_scratch_is_left_to_triton(entered):
    kernel = compiled(entered)
    kernel.run.global_scratch_size = 16
    _, encoded = call_of(kernel, ())
    assert not encoded


def test_tile_is_kept_for_a_place_and_what_it_looks_like():
    q = torch.zeros(100, 2, 128, dtype=torch.bfloat16)
    assert ragged(q, 128) is ragged(q.view(100, 2, 128), 128)
    assert ragged(q, 128) is not ragged(q, 64)
    assert ragged(q, 128) is not ragged(q[:99], 128)
    assert ragged(q, 128) is not ragged(q.half(), 128)
    tile = ragged(q[:, 1:], 64)
    assert (tile.shape, tile.strides) == ([101, 64, 1, 128], [256, 256, 128, 1])
    assert tile.address == q[:, 1:].data_ptr() - 64 * 256 * 2
