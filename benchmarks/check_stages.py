"""Checks the Gluon forward against float64, and times it and the backward, stage by stage.

Needs a Hopper GPU.

python benchmarks/check_stages.py [check] [leaks] [repeat] [time] [backward] [registers] [rules]
    [peers:01]
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longdelta.kernels import eager, gluon
from longdelta.kernels.stages import Tables
from longdelta.ops.boundary import Segments
from longdelta.plan.chunks import walk
from longdelta.plan.tensors import Counts, shape
from longdelta.testing.budgets import relative_l2

DEVICE = torch.device("cuda")
WIDE = ("G", "bound", "S_border", "M", "M_bound")
DTYPES = dict.fromkeys(WIDE, torch.float32) | {"Z": torch.float16}


def gates(kind: str, T: int, HV: int) -> Tensor:
    x = torch.randn(T, HV, device=DEVICE)
    if kind == "mild":
        return torch.nn.functional.logsigmoid(x) / 16
    if kind == "model":
        A = torch.linspace(0.25, 16, HV, device=DEVICE)
        return -A * torch.nn.functional.softplus(x - 4 + torch.rand(HV, device=DEVICE))
    if kind == "zero":
        return torch.zeros(T, HV, device=DEVICE)
    g = torch.full((T, HV), -20.0, device=DEVICE) if kind == "strong" else gates("mild", T, HV)
    if kind == "reset":
        g[torch.arange(7, T, 61, device=DEVICE)] = float("-inf")
    return g


def problem(lengths: list[int], H: int, HV: int, gate: str, keys: str = "random") -> dict[str, Any]:
    T = sum(lengths)
    norm = torch.nn.functional.normalize
    q = norm(torch.randn(T, H, 128, device=DEVICE), dim=-1).bfloat16()
    k = torch.randn(T, H, 128, device=DEVICE)
    if keys == "correlated":
        k = norm(torch.randn(1, H, 128, device=DEVICE), dim=-1) * 128**0.5 + 0.3 * k
    beta = torch.sigmoid(torch.randn(T, HV, device=DEVICE) + (4 if keys == "correlated" else 0))
    return {
        "q": q,
        "k": norm(k, dim=-1).bfloat16(),
        "v": torch.randn(T, HV, 128, device=DEVICE).bfloat16(),
        "g": gates(gate, T, HV),
        "beta": beta * (2 if keys == "beta2" else 1),
        "initial": torch.randn(len(lengths), HV, 128, 128, device=DEVICE),
        "lengths": lengths,
    }


def offsets(lengths: list[int]) -> list[int]:
    result = [0]
    for length in lengths:
        result.append(result[-1] + length)
    return result


class Forward:
    """One forward of a backend, its buffers made once."""

    def __init__(
        self,
        backend: Any,
        x: dict[str, Any],
        wide: bool,
        deterministic: bool = True,
        tapes: bool = False,
    ) -> None:
        self.backend = backend
        convert = (lambda t: t.double()) if wide else (lambda t: t)
        self.x = {n: convert(t) if isinstance(t, Tensor) else t for n, t in x.items()}
        HV = x["v"].shape[1]
        plan = walk(offsets(x["lengths"]), HV, deterministic=deterministic)
        self.tables = Tables(plan, DEVICE)
        counts = Counts.of(plan)
        self.wide = wide

        def new(name: str, dtype: torch.dtype) -> Tensor:
            size = shape(name, counts, HV, 128, 128)
            return torch.full(
                size, float("nan"), dtype=torch.float64 if wide else dtype, device=DEVICE
            )

        self.held = {n: new(n, d) for n, d in DTYPES.items()}
        self.o = torch.full_like(self.x["v"], float("nan"))
        self.final = torch.full_like(self.x["initial"], float("nan"))
        self.S = new("S", torch.bfloat16) if tapes else None
        self.Uh = new("Uh", torch.bfloat16) if tapes else None

    def prepare(self) -> None:
        x, held = self.x, self.held
        made = {n: held[n] for n in ("G", "Z", "bound")}
        self.backend.prepare(x["k"], x["g"], x["beta"], self.tables, **made)

    def summarize(self) -> None:
        x, h = self.x, self.held
        if self.tables.walk.borders:
            self.backend.summarize(
                x["k"],
                x["v"],
                x["beta"],
                h["G"],
                h["Z"],
                h["bound"],
                x["initial"],
                self.tables,
                S_border=h["S_border"],
                M=h["M"],
                M_bound=h["M_bound"],
            )

    def fold(self) -> None:
        if self.tables.walk.borders:
            maps = self.held["M"], self.held["M_bound"]
            Segments().enter(self.backend, *maps, self.tables, S_border=self.held["S_border"])

    def scan(self, o: bool = True) -> None:
        x, h = self.x, self.held
        self.backend.scan(
            x["q"],
            x["k"],
            x["v"],
            x["beta"],
            h["G"],
            h["Z"],
            h["S_border"],
            x["initial"],
            128**-0.5,
            self.tables,
            o=self.o if o else None,
            final_state=self.final if o else None,
            S=self.S,
            Uh=self.Uh,
        )

    def __call__(self) -> None:
        self.prepare()
        self.summarize()
        self.fold()
        self.scan()


class Backward(Forward):
    """One forward with its tapes, then the backward's stages, each by itself."""

    def __init__(self, backend: Any, x: dict[str, Any], deterministic: bool = True) -> None:
        super().__init__(backend, x, wide=False, deterministic=deterministic, tapes=True)
        self.do = torch.randn_like(x["v"])
        likes = {"dS_border": self.held["S_border"], "dS": self.S, "dR": self.Uh}
        self.held |= {n: torch.full_like(like, float("nan")) for n, like in likes.items()}
        nan = {n: torch.full_like(x[n], float("nan")) for n in ("q", "k", "v", "g", "beta")}
        self.found = {"d" + n: t for n, t in nan.items()}
        self.d_initial = torch.full_like(x["initial"], float("nan"))
        self.common = (self.x["q"], self.x["k"], self.x["beta"], self.do)

    def tapes(self) -> None:
        self.scan(o=False)

    def adjoint_summarize(self) -> None:
        if self.tables.walk.borders:
            h = self.held
            self.backend.adjoint_summarize(
                *self.common,
                h["G"],
                h["Z"],
                h["bound"],
                None,
                128**-0.5,
                self.tables,
                dS_border=h["dS_border"],
            )

    def adjoint_fold(self) -> None:
        maps = self.held["M"], self.held["M_bound"]
        Segments().leave(self.backend, *maps, self.tables, dS_border=self.held["dS_border"])

    def adjoint_scan(self) -> None:
        h = self.held
        self.backend.adjoint_scan(
            *self.common,
            h["G"],
            h["Z"],
            h["dS_border"],
            None,
            128**-0.5,
            self.tables,
            dS=h["dS"],
            dR=h["dR"],
            d_initial_state=self.d_initial,
        )

    def gradients(self) -> None:
        x, h = self.x, self.held
        self.backend.gradients(
            x["q"],
            x["k"],
            x["g"],
            x["beta"],
            self.do,
            h["G"],
            self.S,
            self.Uh,
            h["dS"],
            h["dR"],
            128**-0.5,
            self.tables,
            **self.found,
        )

    STAGES = ("prepare", "tapes", "adjoint_summarize", "adjoint_fold", "adjoint_scan", "gradients")

    def __call__(self) -> None:
        for stage in self.STAGES:
            getattr(self, stage)()


CASES = [
    ("lengths, HV = H", [1, 15, 63, 64, 65, 127, 1000], 2, 2, "mild", "random"),
    ("lengths, group 2, model", [1000, 127, 65, 64, 63, 15, 1], 2, 4, "model", "random"),
    ("lengths, group 3, -20", [1, 15, 63, 64, 65, 127, 700], 1, 3, "strong", "random"),
    ("lengths, group 4, resets", [1, 15, 63, 64, 65, 127, 700], 1, 4, "reset", "random"),
    ("split documents, mild", [1500, 2000, 64, 513], 2, 4, "mild", "random"),
    ("split documents, no gate", [1500, 2000, 64, 512], 1, 2, "zero", "random"),
    ("split documents, model", [3000, 17], 1, 4, "model", "random"),
    ("200 documents of 16", [16] * 200, 2, 4, "mild", "random"),
    ("correlated keys, beta near 1", [1000, 700], 2, 4, "mild", "correlated"),
    ("beta up to 2", [1000, 700], 2, 4, "mild", "beta2"),
    ("HV 32, unsplit", [300, 200], 16, 32, "mild", "random"),
]


def check() -> None:
    for name, lengths, H, HV, gate, keys in CASES:
        torch.manual_seed(0)
        x = problem(lengths, H, HV, gate, keys)
        ref = Forward(eager, x, wide=True, tapes=True)
        ref()
        ours = Forward(gluon, x, wide=False)
        ours()
        torch.cuda.synchronize()
        errors = {n: relative_l2(ours.held[n], ref.held[n]) for n in DTYPES if ref.held[n].numel()}
        errors |= {"o": relative_l2(ours.o, ref.o), "final": relative_l2(ours.final, ref.final)}
        for o in (True, False):
            both = Forward(gluon, x, wide=False, tapes=True)
            both.held = ours.held
            both.scan(o)
            torch.cuda.synchronize()
            errors |= {
                f"S/{o}": relative_l2(both.S, ref.S),
                f"Uh/{o}": relative_l2(both.Uh, ref.Uh),
            }
            if o:
                same = torch.equal(both.o, ours.o) and torch.equal(both.final, ours.final)
                first = both
            else:
                same &= torch.equal(both.S, first.S) and torch.equal(both.Uh, first.Uh)
        if ref.tables.walk.maps:
            walk, S = ref.tables.walk, torch.randn_like(ours.held["S_border"])
            theirs, mine = S.double(), S.clone()
            M, M_bound = ours.held["M"], ours.held["M_bound"]
            eager.adjoint_fold(M.double(), M_bound, ref.tables, walk.chains, dS=theirs)
            gluon.adjoint_fold(M, M_bound, ours.tables, walk.chains, dS=mine)
            errors["adjoint_fold"] = relative_l2(mine, theirs)
            theirs, mine = S.double(), S.clone()
            eager.fold(M.double(), M_bound, ref.tables, walk.chains, S=theirs)
            gluon.fold(M, M_bound, ours.tables, walk.chains, S=mine)
            errors["fold"] = relative_l2(mine, theirs)
        print(
            f"{name:32}",
            " ".join(f"{n} {e:.1e}" for n, e in errors.items()),
            "same bits" if same else "BITS DIFFER",
            flush=True,
        )


def leaks() -> None:
    """Documents beside one of NaN and inf, strided views, and rows that belong to nobody."""
    torch.manual_seed(1)
    lengths = [70, 90, 33, 64, 5]
    x = problem(lengths, 2, 4, "mild")
    clean = Forward(gluon, x, wide=False)
    clean()
    bad = {n: t.clone() if isinstance(t, Tensor) else t for n, t in x.items()}
    for n in ("q", "k", "v", "g", "beta"):
        bad[n][70:160] = float("nan")
        bad[n][200] = float("inf") if n != "g" else float("nan")
    dirty = Forward(gluon, bad, wide=False)
    dirty()
    rows = torch.cat([torch.arange(0, 70), torch.arange(160, 193), torch.arange(257, 262)])
    ok = torch.equal(clean.o[rows], dirty.o[rows])
    ok &= all(torch.equal(clean.final[d], dirty.final[d]) for d in (0, 2, 4))
    print("no leak between documents:", ok)
    T = sum(lengths)
    wide = torch.full((T, 2 * 128 * 2 + 4 * 128), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    views = dict(x)
    views["q"] = wide[:, :256].view(T, 2, 128)
    views["k"] = wide[:, 256:512].view(T, 2, 128)
    views["v"] = wide[:, 512:].view(T, 4, 128)
    for n in ("q", "k", "v"):
        views[n].copy_(x[n])
    strided = Forward(gluon, views, wide=False)
    strided.o = torch.full((T + 9, 4, 128), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    strided()
    print(
        "strided views:",
        torch.equal(strided.o[:T], clean.o),
        "rest zero:",
        bool((strided.o[T:] == 0).all()),
    )
    turned = Forward(
        gluon,
        {**x, "initial": x["initial"].transpose(-1, -2).contiguous().transpose(-1, -2)},
        wide=False,
    )
    turned.final = torch.full((5, 4, 128, 128), float("nan"), device=DEVICE).transpose(-1, -2)
    turned()
    print(
        "value-first states:",
        torch.equal(turned.final, clean.final) and torch.equal(turned.o, clean.o),
    )


def repeat() -> None:
    torch.manual_seed(2)
    x = problem([1500, 700, 64, 3, 4000], 2, 8, "mild")
    f = Forward(gluon, x, wide=False)
    f()
    torch.cuda.synchronize()
    first = {n: t.clone() for n, t in {**f.held, "o": f.o, "final": f.final}.items()}
    different = 0
    for _ in range(200):
        for t in (*f.held.values(), f.o, f.final):
            t.fill_(float("nan"))
        f()
        now = {**f.held, "o": f.o, "final": f.final}
        different += any(not torch.equal(now[n], first[n]) for n in first)
    print("200 repeats, different:", different)


_flush: list[Tensor] = []


def graphed(f: Any) -> Any:
    """The launches of f as a CUDA graph, so that the host's time is left out."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        f()
        f()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return graph.replay


def median_ms(f: Any) -> float:
    if not _flush:
        _flush.append(torch.empty(64 << 20, dtype=torch.int32, device=DEVICE))
    for _ in range(3):
        f()
    times = []
    for _ in range(12):
        _flush[0].zero_()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        f()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    return statistics.median(times)


P1 = [40000, 20000, 15000, 12000, 9000, 8000, 6000, 4000, 3000, 2000, 1500, 409]
ROWS = [
    ("(16,32) 32,768", [32768], 16, 32),
    ("(16,48) 120,909 in 12", P1, 16, 48),
    ("(2,8) 65,536", [65536], 2, 8),
    ("(16,48) 8 x 4,096", [4096] * 8, 16, 48),
    ("(4,8) 2,050 x 16", [16] * 2050, 4, 8),
]


def timing() -> None:
    for name, lengths, H, HV in ROWS:
        for deterministic in (True, False) if "12" in name else (True,):
            torch.manual_seed(0)
            x = problem(lengths, H, HV, "model")
            f = Forward(gluon, x, wide=False, deterministic=deterministic)
            f()
            names = ["prepare", "summarize", "fold", "scan"]
            if not f.tables.walk.borders:
                names = ["prepare", "scan"]
            parts = {p: median_ms(graphed(getattr(f, p))) for p in names}
            eager_ms, whole = median_ms(f), median_ms(graphed(f))
            share = 132e3 / (f.tables.walk.chunks * HV)
            print(
                f"{name:24} det={deterministic!s:5} forward {whole:.3f} ms (eager {eager_ms:.3f})",
                "|",
                " ".join(f"{p} {t:.3f}" for p, t in parts.items()),
                f"| us per chunk-head and SM: scan {parts['scan'] * share:.2f}",
                f"prepare {parts['prepare'] * share:.2f}",
                flush=True,
            )


def backward() -> None:
    """A backward that has S_border and M, stage by stage."""
    for name, lengths, H, HV in ROWS:
        x = problem(lengths, H, HV, "model")
        f = Backward(gluon, x)
        for stage in (Forward.__call__, Backward.__call__):
            stage(f)
        parts = {
            p: median_ms(graphed(getattr(f, p)))
            for p in f.STAGES
            if f.tables.walk.borders or ("summ" not in p and "fold" not in p)
        }
        whole = median_ms(graphed(f))
        share = 132e3 / (f.tables.walk.chunks * HV)
        finite = all(bool(t.isfinite().all()) for t in f.found.values())
        print(
            f"{name:24} backward {whole:.3f} ms |",
            " ".join(f"{p} {t:.3f} ({t * share:.2f})" for p, t in parts.items()),
            "| all finite" if finite else "| NOT FINITE",
            flush=True,
        )


def peers(rows: str = "0123") -> None:
    """The same inputs through FlashQLA, if it is installed."""
    from flash_qla import chunk_gated_delta_rule

    for name, lengths, H, HV in (ROWS[int(row)] for row in rows):
        torch.manual_seed(0)
        x = problem(lengths, H, HV, "model")
        arguments = [x[n][None] for n in ("q", "k", "v", "g", "beta")]
        options = {
            "scale": 128**-0.5,
            "initial_state": x["initial"],
            "output_final_state": True,
            "cu_seqlens": torch.tensor(offsets(lengths), dtype=torch.int32, device=DEVICE),
        }
        run = torch.no_grad()(partial(chunk_gated_delta_rule, *arguments, **options))

        start = time.time()
        o = run()[0]
        torch.cuda.synchronize()
        first = time.time() - start
        f = Forward(gluon, x, wide=False, deterministic=False)
        f()
        theirs, ours = median_ms(run), median_ms(f)
        try:
            theirs_replay = median_ms(graphed(run))
        except RuntimeError:
            theirs_replay = float("nan")
        replay = median_ms(graphed(f))
        print(
            f"{name:24} eager: FlashQLA {theirs:.3f} ours {ours:.3f} ({theirs / ours:.2f}x)",
            f"replay: FlashQLA {theirs_replay:.3f} ours {replay:.3f}",
            f"({theirs_replay / replay:.2f}x)",
            f"first call {first:.0f} s, o differs by {relative_l2(f.o, o[0]):.1e}",
            flush=True,
        )


def rules() -> None:
    """Segment lengths: of long documents, and of short ones alone and packed."""
    from longdelta.plan import chunks as plan

    kept = plan.segment_chunks
    for lengths, H, HV, steps in (
        ([65536], 2, 8, (16, 24, 32, 48, 64)),
        ([65536], 2, 6, (16, 32, 64)),
        ([32768], 16, 32, (64, 128, 171, 256)),
        ([10923] * 6, 2, 6, (8, 16, 32)),
        ([8192], 16, 32, (16, 32, 64, 1000)),
        ([4096], 16, 16, (8, 16, 32, 1000)),
        ([4096] * 16, 16, 16, (8, 16, 32, 1000)),
        ([2048], 16, 32, (8, 16, 1000)),
        ([2048] * 16, 16, 32, (8, 16, 1000)),
    ):
        for step in steps:
            plan.segment_chunks = lambda tokens, heads, packed, step=step: step
            f = Forward(gluon, problem(lengths, H, HV, "model"), wide=False)
            f()
            names = (
                ["prepare", "summarize", "fold", "scan"]
                if f.tables.walk.borders
                else ["prepare", "scan"]
            )
            parts = {p: median_ms(graphed(getattr(f, p))) for p in names}
            print(
                f"{len(lengths)} x {lengths[0]}",
                H,
                HV,
                step,
                f"{median_ms(graphed(f)):.3f}",
                " ".join(f"{p} {t:.3f}" for p, t in parts.items()),
                flush=True,
            )
    plan.segment_chunks = kept


def registers() -> None:
    """Tuned constants around their values; a plan keeps its programs, so each has a new one."""
    for row, stage, names, values in (
        (ROWS[0], "prepare", ("_REGISTERS", "_RESIDENT"), ((168, 12), (255, 8))),
        (ROWS[1], "prepare", ("_REGISTERS", "_RESIDENT"), ((168, 12), (255, 8))),
        (ROWS[0], "summarize", ("_STAGES", "_X_STAGES"), ((3, 2), (3, 3), (4, 2))),
        (ROWS[2], "fold", ("_COLUMNS",), ((16,), (32,))),
    ):
        module = sys.modules[f"longdelta.kernels.gluon.{stage}"]
        kept = [getattr(module, name) for name in names]
        x = problem(row[1], row[2], row[3], "model")
        for value in values:
            for name, one in zip(names, value, strict=True):
                setattr(module, name, one)
            f = Forward(gluon, x, wide=False)
            f()
            print(row[0], stage, value, f"{median_ms(graphed(getattr(f, stage))):.3f}", flush=True)
        for name, one in zip(names, kept, strict=True):
            setattr(module, name, one)


def once() -> None:
    """One forward, for a profiler."""
    torch.manual_seed(0)
    for row in (ROWS[2], ROWS[4]):
        f = Forward(gluon, problem(row[1], row[2], row[3], "model"), wide=False)
        f()
    torch.cuda.synchronize()


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["check", "leaks", "repeat", "time"]
    parts = {
        "check": check,
        "leaks": leaks,
        "repeat": repeat,
        "time": timing,
        "peers": peers,
        "once": once,
        "registers": registers,
        "rules": rules,
        "backward": backward,
    }
    for part in wanted:
        name, _, option = part.partition(":")
        parts[name](*[option] * bool(option))
