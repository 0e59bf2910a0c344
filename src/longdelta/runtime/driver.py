"""What lies between a launch and the driver: Triton's launcher, and past it.

Note [Words]: Triton's launcher asks the driver about every tensor, encodes every descriptor, 1.4 us
each, and hands on what it finds to an entry point in C. That entry takes addresses and encoded
descriptors as they are, so that what was encoded once is passed again. Where this Triton keeps no
such entry, its launcher is called as it stands, with addresses, and tiles as they are: slower, with
the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from inspect import getclosurevars, isfunction
from typing import Any

import torch

Call = Callable[[int, int, "list[Any]"], None]
"""Of a compiled kernel: grid, stream, words of the arguments that move."""


class Tile:
    """Memory as the copy engine reads it, tile by tile: what Triton's descriptors hold.

    shape and strides in elements, block_shape of a tile, layout of a tile in shared memory, ahead:
    how many bytes it starts before the tensor whose tiles it has.
    """

    __slots__ = ("address", "ahead", "block_shape", "dtype", "layout", "shape", "strides", "words")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(
        self,
        dtype: torch.dtype,
        address: int,
        shape: list[int],
        strides: list[int],
        block_shape: list[int],
        layout: Any,
        ahead: int = 0,
    ) -> None:
        self.dtype, self.address, self.ahead = dtype, address, ahead
        self.shape, self.strides, self.block_shape, self.layout = (
            shape,
            strides,
            block_shape,
            layout,
        )
        self.words: list[Any] = []
        """Encoded by the first launch that reads it."""

    @property
    def base(self) -> Tile:
        """Triton asks where a descriptor starts for its address and dtype alone."""
        return self

    def data_ptr(self) -> int:
        """Where it starts; nothing need be there, as long as no tile is read outside of memory."""
        return self.address

    def of(self, address: int) -> Tile:
        """The same of a tensor that lies there."""
        look = self.shape, self.strides, self.block_shape, self.layout, self.ahead
        return Tile(self.dtype, address - self.ahead, *look)

    def descriptor(self) -> Any:
        """As Triton resolves a launch with it."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(self, self.shape, self.strides, self.block_shape, self.layout)


@lru_cache(maxsize=1)
def _encoder() -> Callable[[Tile, Any], list[Any]]:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    if make_tensordesc_arg.__code__.co_argcount == 2:
        return make_tensordesc_arg  # type: ignore[no-any-return]
    # Triton 3.7 and later hand on a third argument, which this function does not use.
    return lambda tile, how: make_tensordesc_arg(tile, how, None)


def encode(tile: Tile, how: Any) -> list[Any]:
    """Its words, made by Triton; how: what the compiler noted of the argument."""
    tile.words = _encoder()(tile, how)
    return tile.words


def call_of(compiled: Any, rest: tuple[Any, ...]) -> tuple[Call, bool]:
    """How a compiled kernel is launched, and whether it takes tiles encoded; rest: the arguments
    after those that move."""
    run = compiled.run
    function, packed = compiled.function, compiled.packed_metadata

    def slow(grid: int, stream: int, words: list[Any]) -> None:
        run(grid, 1, 1, stream, function, packed, None, None, None, *words, *rest)

    entry = getattr(run, "launch", None)
    if isfunction(entry):
        entry = getclosurevars(entry).nonlocals.get("launcher")
    if entry is None or run.global_scratch_size or run.profile_scratch_size:
        return slow, False
    options = (run.launch_cooperative_grid, run.launch_pdl)
    if hasattr(run, "arg_annotations"):  # Triton 3.7 and later: one entry for every kernel
        head = (function, *options, packed, *[None] * 5, run.arg_annotations, run.kernel_signature)

        def fast(grid: int, stream: int, words: list[Any]) -> None:
            entry(grid, 1, 1, stream, *head, (*words, *rest))

        return fast, True
    head = (function, *options, None, None, packed, None, None, None)

    def direct(grid: int, stream: int, words: list[Any]) -> None:
        entry(grid, 1, 1, stream, *head, *words, *rest)

    return direct, True
