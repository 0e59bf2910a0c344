"""``longdelta demo``: a byte-level language model of GatedDeltaNet layers, trained on a real text.

Every step packs documents of unlike lengths into one row, which may be spread over processes. At
the end the model writes a line, token by token through its states, and the op's gradients on the
trained model's own q, k, v and gates are compared with the float64 reference.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

import longdelta
from longdelta import reference
from longdelta.cli.model import V_HEADS, Batch, Block, ByteModel
from longdelta.cli.options import check_layout, check_picture
from longdelta.cli.spread import SpreadCheck, SpreadStep, Step, default_ranks, step_alone
from longdelta.distributed.collectives import Group, place_in
from longdelta.errors import InvalidInput
from longdelta.nn import LayerState, Operands
from longdelta.plan.partition import partition
from longdelta.testing import budgets
from longdelta.testing.ranks import RankPool

STEP_TOKENS = 1024
SHORTEST, LONGEST = 8, 512
"""Tokens of a packed document; lengths are log-uniform between them."""
PEAK_RATE, WARM_UP = 4e-3, 0.1
SAMPLE_BYTES, TEMPERATURE = 100, 0.7
THREADS_PER_CORE, MOST_RANKS = 4, 64
LONGEST_RUN_S, LONGEST_MESSAGE_S = 86400.0, 300.0
CHECKED_LENGTHS = (37, 1, 90)
"""Documents of the gradient comparison: within a chunk, a single token, across two chunks."""


@dataclass(frozen=True)
class DemoOptions:
    """text: file or None for the project's documentation; threads: 0 is one; ranks: processes that
    share each step, None for a sensible number; layout, align: as in `build_cp_context`.

    Tensors this small gain little from a second thread, and on a busy core it costs much: 20 steps
    took 3.0 s on one thread and 67.6 s on two, of two cores with other work (torch 2.13).
    """

    text: Path | None = None
    steps: int = 300
    seed: int = 0
    device: str = "auto"
    threads: int = 0
    plot: Path | None = None
    ranks: int | None = None
    layout: str = "zigzag"
    align: str = "token"


@dataclass(frozen=True)
class Comparison:
    """Relative L2 error of one tensor against float64, and what it may be."""

    name: str
    error: float
    budget: float

    @property
    def passed(self) -> bool:
        return self.error <= self.budget


@dataclass(frozen=True)
class DemoResult:
    """losses: nats per byte of each step; entropy: of single bytes of the text, in nats."""

    losses: tuple[float, ...]
    entropy: float
    seconds: float
    sample: str
    comparisons: tuple[Comparison, ...]
    spread: tuple[SpreadCheck, ...] = ()
    """Of the first and last step; empty for one process."""

    @property
    def end_loss(self) -> float:
        """Mean of the last tenth of the steps."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last)

    @property
    def passed(self) -> bool:
        right = all(c.passed for c in self.comparisons) and all(c.passed for c in self.spread)
        return math.isfinite(self.end_loss) and right


def run_demo(options: DemoOptions, console: Console | None = None) -> DemoResult:
    """Train, sample, compare, and print each.

    Raises:
        InvalidInput (a ValueError): the text is missing or too short, the device is not there, or
            the plot cannot be written.
    """
    console = console or Console()
    device = _device(options.device)
    if options.plot is not None:
        check_picture("plot", options.plot)
    _check_seed_and_threads(options)
    read_text(options.text)
    ranks, why = default_ranks(device)
    if options.ranks is not None:
        ranks, why = options.ranks, f"as asked; {why}"
    _check_ranks(ranks, options, device)
    if ranks == 1:
        console.print(f"One process ({why}); --ranks 2 spreads each step over two.")
        result = _run(options, console, device, step_alone)
        assert result is not None
        return result
    backend = "nccl" if device.type == "cuda" else "gloo"
    console.print(
        f"{ranks} processes on {backend} ({why}) share the tokens of each step: "
        f"{options.layout}, cut by {options.align}."
    )
    with RankPool(ranks, backend, LONGEST_RUN_S, LONGEST_MESSAGE_S) as pool:
        found: DemoResult = pool.run(ranks, demo_on_rank, options)[0]
    return found


def demo_on_rank(group: Group, options: DemoOptions) -> DemoResult | None:
    """The demo on one process of several; the first one prints and returns the result."""
    rank, _ = place_in(group)
    device = _device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
    step = SpreadStep(group, options.layout, options.align, V_HEADS, last=options.steps - 1)
    return _run(options, Console(quiet=rank > 0), device, step, lead=rank == 0)


def _run(
    options: DemoOptions, console: Console, device: torch.device, step: Step, lead: bool = True
) -> DemoResult | None:
    name, text = read_text(options.text)
    torch.set_num_threads(options.threads or 1)
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
    model = ByteModel().to(device)

    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"{name}: {len(text):,} bytes. Model: {parameters:,} parameters on {device}.")
    started = time.perf_counter()
    losses = _train(model, data, options.steps, rng, console, step)
    if not lead:
        return None
    seconds = time.perf_counter() - started
    checks = tuple(step.checks) if isinstance(step, SpreadStep) else ()
    comparisons = compare_gradients(model, data, rng)
    sample = write_line(model, data, rng)
    result = DemoResult(losses, byte_entropy(text), seconds, sample, comparisons, checks)
    _report(result, console)
    if options.plot is not None:
        _plot(result, options.plot)
        console.print(f"Loss curve: {options.plot}")
    return result


def read_text(path: Path | None) -> tuple[str, bytes]:
    """The file's name and bytes; for None the project's documentation, or else its own sources.

    Raises:
        InvalidInput (a ValueError): no such file, or fewer than two bytes.
    """
    if path is not None:
        if not path.is_file():
            raise InvalidInput(f"text must be a readable file, got {path}; check the path")
        try:
            text = path.read_bytes()
        except OSError as error:
            raise InvalidInput(f"text must be a readable file, got {path}: {error}") from None
        if len(text) < 2:
            raise InvalidInput(
                f"text must hold at least 2 bytes, got {len(text)} in {path}; pass a longer file"
            )
        return path.name, text
    package = Path(longdelta.__file__).parent
    root = package.parents[1]
    documents = [root / "README.md", root / "CHANGELOG.md", *sorted(root.glob("docs/**/*.md"))]
    if (root / "pyproject.toml").is_file() and documents[0].is_file():
        name = "The project's documentation"
    else:
        name, documents = "The package's sources", sorted(package.rglob("*.py"))
    return name, b"\n".join(d.read_bytes() for d in documents if d.is_file())


def byte_entropy(text: bytes) -> float:
    """-sum_b p_b log p_b over the text's byte frequencies, in nats: what a model without context
    reaches at best.
    """
    return -sum(n / len(text) * math.log(n / len(text)) for n in Counter(text).values())


def draw_batch(data: Tensor, rng: random.Random) -> Batch:
    """STEP_TOKENS tokens in documents of unlike lengths, each from a random place of the text."""
    lengths: list[int] = []
    while (left := STEP_TOKENS - sum(lengths)) > 0:
        drawn = round(math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST))))
        lengths.append(min(drawn, left, len(data) - 1))
    return _pack(data, lengths, rng)


def compare_gradients(model: ByteModel, data: Tensor, rng: random.Random) -> tuple[Comparison, ...]:
    """The op on what the first block's layer feeds it, against the float64 recurrence: o,
    final_state and every gradient, for random cotangents of both.
    """
    # A text shorter than the documents is repeated: without a past the gate's gradients vanish.
    data = data.repeat(1 + max(CHECKED_LENGTHS) // len(data))
    batch = _pack(data, list(CHECKED_LENGTHS), rng)
    block = model.blocks[0]
    assert isinstance(block, Block)
    layer = block.mixer
    with torch.no_grad():
        x = block.mixer_norm(model.embedding(batch.tokens))
        operands = layer.operands(x, batch.cu_seqlens)
    inputs = {
        name: tensor.detach().clone().requires_grad_()
        for name, tensor in zip("qkvab", operands[:5], strict=True)
    }
    o, final_state = layer.mix(
        Operands(**inputs, conv_state=None), batch.cu_seqlens, output_final_state=True
    )
    assert final_state is not None
    gates = {"A_log": layer.A_log, "dt_bias": layer.dt_bias}
    do, d_final_state = torch.randn_like(o), torch.randn_like(final_state)
    leaves = [*inputs.values(), *gates.values()]
    gradients = torch.autograd.grad([o, final_state], leaves, [do, d_final_state])

    exact = {n: t.detach().cpu().double().requires_grad_() for n, t in (inputs | gates).items()}
    share = exact["b"].sigmoid() * (2 if layer.allow_neg_eigval else 1)
    expected = reference.recurrence(
        reference.l2norm(exact["q"][0]),
        reference.l2norm(exact["k"][0]),
        exact["v"][0],
        reference.gate(exact["a"][0], exact["A_log"], exact["dt_bias"]),
        share[0],
        scale=layer.K**-0.5,
        cu_seqlens=batch.cu_seqlens.tolist(),
    )
    cotangents = [do[0].cpu().double(), d_final_state.cpu().double()]
    truths = torch.autograd.grad(list(expected), list(exact.values()), cotangents)
    pairs = {"o": (o[0], expected.o), "final_state": (final_state, expected.final_state)}
    names = [f"d{name}" for name in exact]
    pairs |= dict(zip(names, zip(gradients, truths, strict=True), strict=True))
    return tuple(
        Comparison(n, budgets.relative_l2(out, truth), budgets.EAGER[out.dtype])
        for n, (out, truth) in pairs.items()
    )


@torch.no_grad()
def write_line(model: ByteModel, data: Tensor, rng: random.Random) -> str:
    """A few bytes of the text and what the model writes after them, through its states."""
    prompt = min(16, len(data))
    place = rng.randrange(len(data) - prompt + 1)
    written = data[place : place + prompt].tolist()
    tokens = data[None, place : place + prompt]
    states: list[LayerState | None] | None = None
    for _ in range(SAMPLE_BYTES):
        boundaries = torch.tensor([0, tokens.shape[1]], device=data.device)
        logits, states = model(tokens, boundaries, states, output_final_state=True)
        tokens = torch.multinomial((logits[:, -1] / TEMPERATURE).softmax(-1), 1)
        written.append(int(tokens))
    return bytes(written).decode("utf-8", errors="replace")


def _pack(data: Tensor, lengths: list[int], rng: random.Random) -> Batch:
    places = [rng.randrange(len(data) - n) for n in lengths]
    index = torch.cat([torch.arange(p, p + n) for p, n in zip(places, lengths, strict=True)])
    index = index.to(data.device)
    boundaries = torch.tensor([0, *accumulate(lengths)], device=data.device)
    return Batch(data[index][None], data[index + 1][None], boundaries)


def _train(
    model: ByteModel,
    data: Tensor,
    steps: int,
    rng: random.Random,
    console: Console,
    step: Step,
) -> tuple[float, ...]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: _rate(i, steps))
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f} nats/byte"),
        TimeElapsedColumn(),
    )
    losses: list[float] = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps, loss=math.nan)
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(step(model, draw_batch(data, rng)))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress.update(task, advance=1, loss=losses[-1])
    return tuple(losses)


def _rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up, then a half cosine down to a tenth."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def _report(result: DemoResult, console: Console) -> None:
    table = Table(title="Op against the float64 reference, on the trained model's q, k, v, a, b")
    table.add_column("tensor")
    for heading in ("relative L2 error", "budget", ""):
        table.add_column(heading, justify="right")
    for c in result.comparisons:
        verdict = Text("pass", "green") if c.passed else Text("FAIL", "bold red")
        table.add_row(c.name, f"{c.error:.1e}", f"{c.budget:.1e}", verdict)
    console.print(table)
    for when, check in zip(("First", "Last"), result.spread, strict=False):
        console.print(
            f"{when} step: loss {check.loss:.6f} on all processes, {check.loss_alone:.6f} in one; "
            f"largest gradient difference {check.largest:.1e} of {check.size:.1e}, "
            f"relative L2 {check.error:.1e} (budget {check.budget:.1e}): "
            f"{'pass' if check.passed else 'FAIL'}."
        )
    steps, below = len(result.losses), result.entropy - result.end_loss
    console.print(
        f"{steps} steps of {STEP_TOKENS} bytes in {result.seconds:.1f} s. "
        f"Loss {result.losses[0]:.3f} at first, {result.end_loss:.3f} nats/byte at the end: "
        f"{abs(below):.3f} {'below' if below >= 0 else 'ABOVE'} "
        f"the {result.entropy:.3f} nats of single bytes."
    )
    line = "".join(c if c.isprintable() else " " for c in result.sample.replace("\n", "\\n"))
    console.print(Text("Sample: ", "bold") + Text(line, "not bold"))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        known = device.type in ("cpu", "cuda")
    except RuntimeError:
        known = False
    if not known:
        raise InvalidInput(f"device must be auto, cpu or cuda, got {name!r}; choose one")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInput(
            f"device must be present, got {name!r} of {torch.cuda.device_count()}; "
            "pass --device cpu"
        )
    return device


def _check_ranks(ranks: int, options: DemoOptions, device: torch.device) -> None:
    """Raises where the processes could not start, or could not share a step."""
    if not 1 <= ranks <= MOST_RANKS:
        raise InvalidInput(f"ranks must be at least 1 and at most {MOST_RANKS}, got {ranks}")
    if device.type == "cuda" and ranks > max(1, torch.cuda.device_count()):
        raise InvalidInput(
            f"ranks must be at most the {torch.cuda.device_count()} GPUs here, got {ranks}; "
            "pass --device cpu"
        )
    check_layout(options.layout)
    partition([0], ranks, options.layout, align=options.align)


def _check_seed_and_threads(options: DemoOptions) -> None:
    if not 0 <= options.seed < 2**63:
        raise InvalidInput(f"seed must be from 0 to 2**63 - 1, got {options.seed}; choose another")
    cores = os.cpu_count() or 1
    if options.threads > THREADS_PER_CORE * cores:
        raise InvalidInput(
            f"threads must be at most {THREADS_PER_CORE * cores}, "
            f"{THREADS_PER_CORE} for each core here, got {options.threads}; leave it out for one"
        )


def _plot(result: DemoResult, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(result.losses) + 1), result.losses, lw=1, label="training loss")
    axes.axhline(result.entropy, color="gray", ls="--", label="entropy of single bytes")
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.legend()
    figure.savefig(path, dpi=150)
