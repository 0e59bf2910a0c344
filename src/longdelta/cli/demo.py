"""``longdelta demo``: a byte-level language model of GatedDeltaNet layers, trained on a real text.

Every step packs documents of unlike lengths into one row. At the end the model writes a line, token
by token through its states, and the op's gradients on the trained model's own q, k, v and gates are
compared with the float64 reference.
"""

from __future__ import annotations

import importlib.util
import math
import random
import time
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

import longdelta
from longdelta import reference
from longdelta.errors import InvalidInput
from longdelta.nn import GatedDeltaNet, LayerState, Operands
from longdelta.testing import budgets

BYTES = 256
HIDDEN, BLOCKS, HEADS, V_HEADS, HEAD_DIM = 128, 2, 2, 4, 32
STEP_TOKENS = 1024
SHORTEST, LONGEST = 8, 512
"""Tokens of a packed document; lengths are log-uniform between them."""
PEAK_RATE, WARM_UP = 4e-3, 0.1
SAMPLE_BYTES, TEMPERATURE = 100, 0.7
CHECKED_LENGTHS = (37, 1, 90)
"""Documents of the gradient comparison: within a chunk, a single token, across two chunks."""


@dataclass(frozen=True)
class DemoOptions:
    """text: file or None for the project's documentation; threads: 0 is one.

    Tensors this small gain little from a second thread, and on a busy core it costs much: 20 steps
    took 3.0 s on one thread and 67.6 s on two, of two cores with other work (torch 2.13).
    """

    text: Path | None = None
    steps: int = 300
    seed: int = 0
    device: str = "auto"
    threads: int = 0
    plot: Path | None = None


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

    @property
    def end_loss(self) -> float:
        """Mean of the last tenth of the steps."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last)

    @property
    def passed(self) -> bool:
        return math.isfinite(self.end_loss) and all(c.passed for c in self.comparisons)


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
        self, x: Tensor, cu_seqlens: Tensor, state: LayerState | None, output_final_state: bool
    ) -> tuple[Tensor, LayerState | None]:
        mixed = self.mixer(
            self.mixer_norm(x),
            cu_seqlens,
            initial_state=state,
            output_final_state=output_final_state,
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
        cu_seqlens: Tensor,
        states: list[LayerState | None] | None = None,
        output_final_state: bool = False,
    ) -> ModelOutput:
        x = self.embedding(tokens)
        after = []
        for block, state in zip(self.blocks, states or [None] * BLOCKS, strict=True):
            x, state = block(x, cu_seqlens, state, output_final_state)
            after.append(state)
        return ModelOutput(self.head(x), after)


class Batch(NamedTuple):
    """tokens, targets ``[1, T]`` int64; cu_seqlens ``[N + 1]`` int64, on the model's device."""

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor


def run_demo(options: DemoOptions, console: Console | None = None) -> DemoResult:
    """Train, sample, compare, and print each.

    Raises:
        InvalidInput (a ValueError): the text is missing or too short, the device is not there, or
            the plot cannot be written.
    """
    console = console or Console()
    device = _device(options.device)
    if options.plot is not None:
        _check_plot(options.plot)
    name, text = read_text(options.text)
    torch.set_num_threads(options.threads or 1)
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
    model = ByteModel().to(device)

    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"{name}: {len(text):,} bytes. Model: {parameters:,} parameters on {device}.")
    started = time.perf_counter()
    losses = _train(model, data, options.steps, rng, console)
    seconds = time.perf_counter() - started
    comparisons = compare_gradients(model, data, rng)
    sample = write_line(model, data, rng)
    result = DemoResult(losses, byte_entropy(text), seconds, sample, comparisons)
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
        text = path.read_bytes()
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
    model: ByteModel, data: Tensor, steps: int, rng: random.Random, console: Console
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
            tokens, targets, cu_seqlens = draw_batch(data, rng)
            loss = F.cross_entropy(model(tokens, cu_seqlens).logits[0], targets[0])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
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
    except RuntimeError:
        raise InvalidInput(f"device must be auto, cpu or cuda, got {name!r}; choose one") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInput(
            f"device must be present, got {name!r} of {torch.cuda.device_count()}; "
            "pass --device cpu"
        )
    return device


def _check_plot(path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidInput("plot must be left out without matplotlib; install it to draw the curve")
    if path.suffix != ".png" or not path.absolute().parent.is_dir():
        raise InvalidInput(f"plot must be a .png in a folder that exists, got {path}; change it")


def _plot(result: DemoResult, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(result.losses) + 1), result.losses, lw=1, label="training loss")
    axes.axhline(result.entropy, color="gray", ls="--", label="entropy of single bytes")
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.legend()
    figure.savefig(path, dpi=150)
