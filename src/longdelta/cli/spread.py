"""A training step of the demo spread over processes, checked against the step of one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longdelta.cli.model import Batch, ByteModel
from longdelta.distributed import CPContext, build_cp_context
from longdelta.distributed.collectives import Group, all_gather
from longdelta.testing import budgets

Step = Callable[[ByteModel, Batch], float]
"""Fills the gradients of a model for a batch; returns the mean loss of its tokens."""


def step_alone(model: ByteModel, batch: Batch) -> float:
    """The step of one process."""
    logits = model(batch.tokens, batch.cu_seqlens).logits[0]
    loss = F.cross_entropy(logits, batch.targets[0])
    loss.backward()
    return loss.item()


@dataclass(frozen=True)
class SpreadCheck:
    """One step both ways, from equal weights: losses in nats, and gradients of all parameters.

    largest: of the absolute differences; size: of the absolute gradients; error: relative L2.
    """

    loss: float
    loss_alone: float
    largest: float
    size: float
    error: float
    budget: float

    @property
    def passed(self) -> bool:
        return self.error <= self.budget and abs(self.loss - self.loss_alone) <= (
            self.budget * abs(self.loss_alone)
        )


class SpreadStep:
    """The step on this rank's share of the tokens; gradients are summed over ranks in rank order,
    so that every rank goes on with the same bits. Rank 0 repeats the first and the last step alone.
    """

    def __init__(self, group: Group, layout: str, align: str, num_v_heads: int, last: int) -> None:
        self.group, self.layout, self.align = group, layout, align
        self.num_v_heads, self.last = num_v_heads, last
        self.count = 0
        self.checks: list[SpreadCheck] = []

    def __call__(self, model: ByteModel, batch: Batch) -> float:
        context = self._context(batch)
        tokens, targets = context.shard(batch.tokens), context.shard(batch.targets)
        logits = model(tokens, cp_context=context).logits[0]
        share = F.cross_entropy(logits, targets[0], reduction="sum") / batch.tokens.numel()
        share.backward()
        parameters = list(model.parameters())
        mine = torch.cat([share.detach().reshape(1), *map(_gradient, parameters)])
        total = all_gather("gradients", mine, self.group).sum(0)
        loss, gradient = float(total[0]), total[1:]
        if context.rank == 0 and self.count in (0, self.last):
            self.checks.append(_check(model, batch, loss, gradient))
        self.count += 1
        parts = gradient.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()
        return loss

    def _context(self, batch: Batch) -> CPContext:
        # Cut anywhere, states round otherwise than on one device: that is what is measured here.
        warnings.filterwarnings("ignore", message="longdelta: a cut of this context")
        return build_cp_context(
            batch.cu_seqlens,
            self.group,
            self.layout,
            align=self.align,
            num_v_heads=self.num_v_heads,
        )


def _gradient(parameter: nn.Parameter) -> Tensor:
    found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found.flatten()


def _check(model: ByteModel, batch: Batch, loss: float, gradient: Tensor) -> SpreadCheck:
    model.zero_grad()
    alone = step_alone(model, batch)
    exact = torch.cat([_gradient(parameter) for parameter in model.parameters()])
    return SpreadCheck(
        loss=loss,
        loss_alone=alone,
        largest=(gradient - exact).abs().max().item(),
        size=exact.abs().max().item(),
        error=budgets.relative_l2(gradient, exact),
        budget=budgets.EAGER[gradient.dtype],
    )


def default_ranks(device: torch.device) -> tuple[int, str]:
    """How many processes are sensible here, and why."""
    if device.type == "cuda":
        gpus = torch.cuda.device_count()
        return min(2, gpus), f"{gpus} GPUs here"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (2 if (cores or 1) >= 4 else 1), f"{cores} cores here"
