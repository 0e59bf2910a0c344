"""The demo's model: bytes in, GatedDeltaNet blocks, logits of the next byte out."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from longdelta.distributed import CPContext
from longdelta.nn import GatedDeltaNet, LayerState

BYTES = 256
HIDDEN, BLOCKS, HEADS, V_HEADS, HEAD_DIM = 128, 2, 2, 4, 32


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(HIDDEN)
        self.mixer = GatedDeltaNet(HIDDEN, HEADS, V_HEADS, head_dim=HEAD_DIM)
        self.mlp = nn.Sequential(
            nn.RMSNorm(HIDDEN),
            nn.Linear(HIDDEN, 3 * HIDDEN, bias=False),
            nn.SiLU(),
            nn.Linear(3 * HIDDEN, HIDDEN, bias=False),
        )

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None,
        state: LayerState | None,
        output_final_state: bool,
        cp_context: CPContext | None,
    ) -> tuple[Tensor, LayerState | None]:
        mixed = self.mixer(
            self.mixer_norm(x),
            cu_seqlens,
            initial_state=state,
            output_final_state=output_final_state,
            cp_context=cp_context,
        )
        x = x + mixed.y
        return x + self.mlp(x), mixed.final_state


class ModelOutput(NamedTuple):
    """logits ``[1, T, 256]``; states: one per block, None where not asked for."""

    logits: Tensor
    states: list[LayerState | None]


class ByteModel(nn.Module):
    """Next-byte model of packed documents."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Sequential(nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, BYTES, bias=False))

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        states: list[LayerState | None] | None = None,
        output_final_state: bool = False,
        cp_context: CPContext | None = None,
    ) -> ModelOutput:
        x = self.embedding(tokens)
        after = []
        for block, state in zip(self.blocks, states or [None] * BLOCKS, strict=True):
            x, state = block(x, cu_seqlens, state, output_final_state, cp_context)
            after.append(state)
        return ModelOutput(self.head(x), after)


class Batch(NamedTuple):
    """tokens, targets ``[1, T]`` int64; cu_seqlens ``[N + 1]`` int64, on the model's device."""

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor
