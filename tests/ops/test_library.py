"""The two operators as torch sees them: checks of the registration, fake tensors, compilation."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from longdelta import chunk_gated_delta_rule
from longdelta.arguments import inputs_of
from longdelta.ops import dispatch, library
from longdelta.plan.tensors import capacity, saved_bytes
from longdelta.testing.workloads import (
    LEAVES,
    MACHINES,
    NAMED,
    Machine,
    Results,
    Workload,
    assert_bitwise,
    evaluate,
)

RAW = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": True,
}
SETS = {
    # workload, dtype, options
    "packed": (NAMED["mild"], torch.float32, {"save": "light"}),
    "split_and_saved": (NAMED["split_groups"], torch.bfloat16, {"save": "full"}),
    "nothing_optional": (
        Workload(lengths=(70,), tail=0, initial=False),
        torch.float64,
        {"save": "none", "output_final_state": False},
    ),
    "raw_and_transposed": (
        Workload(lengths=(70,), tail=3, V=8),
        torch.float32,
        {"save": "light", "state_v_first": True, **RAW},
    ),
}


@pytest.fixture(params=SETS)
def arguments(request) -> tuple:
    """Arguments of `longdelta::forward` as a compiler gives them, with leaves that require
    gradients."""
    work, dtype, options = SETS[request.param]
    x = work.inputs(dtype)
    given = {name: getattr(x, name) for name in LEAVES}
    if options.get("use_gate_in_kernel"):
        given |= {"A_log": torch.zeros(work.HV), "dt_bias": torch.ones(work.HV)}
    given = {name: None if y is None else y.clone().requires_grad_() for name, y in given.items()}
    options = {"output_final_state": True} | options
    return tuple(inputs_of(**given, cu_seqlens=x.cu_seqlens, **options)._replace(traced=True))


def test_the_forward_operator_passes_opcheck(arguments):
    # The saved set has unused bytes between and after its tensors: this mode fills them alike.
    torch.use_deterministic_algorithms(True)
    checks = torch.library.opcheck(torch.ops.longdelta.forward.default, arguments)
    assert set(checks.values()) == {"SUCCESS"}


def test_a_graph_of_another_tracer_compiles():
    """Its saved set has the size that the compiler works out, whatever the packing needs."""
    x = Workload(lengths=(70, 0, 1030, 1100), H=1, HV=2).inputs(torch.float32)
    five = [getattr(x, name).requires_grad_() for name in LEAVES[:5]]

    def step(offsets, *five):
        o, _ = chunk_gated_delta_rule(*five, cu_seqlens=offsets)
        return o, *torch.autograd.grad(o.square().sum(), five)

    graph = make_fx(step)(x.cu_seqlens, *five)
    with torch.no_grad():
        found = torch.compile(graph, backend="aot_eager")(x.cu_seqlens, *five)
    for a, b in zip(found, step(x.cu_seqlens, *five), strict=True):
        assert torch.equal(a, b)


def test_the_backward_operator_passes_opcheck(arguments):
    plain = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
    o, final_state, saved = torch.ops.longdelta.forward(*plain)
    d_state = torch.ones_like(final_state) if final_state.numel() else None
    checks = torch.library.opcheck(
        torch.ops.longdelta.backward.default, (torch.ones_like(o), d_state, saved, *plain)
    )
    assert set(checks.values()) == {"SUCCESS"}


def test_fake_tensors_have_the_shapes_dtypes_and_strides_of_real_ones(arguments):
    plain = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
    real = torch.ops.longdelta.forward(*plain)
    gradients = torch.ops.longdelta.backward(torch.ones_like(real[0]), None, real[2], *plain)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in plain]
        fake = torch.ops.longdelta.forward(*fakes)
        fake_gradients = torch.ops.longdelta.backward(fake[0], None, fake[2], *fakes)
    for x, y in zip((*real, *gradients), (*fake, *fake_gradients), strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
    saved = fake[2]
    T, N = plain[0].shape[1], real[1].shape[0]
    if N:
        HV, K, V = plain[2].shape[2], plain[1].shape[3], plain[2].shape[3]
        kept = next(x for x in plain if x in ("none", "light", "full") and isinstance(x, str))
        name = str(plain[0].dtype).removeprefix("torch.")
        most = capacity(T, N, HV)
        assert saved.shape[0] == saved_bytes(kept, most, HV=HV, K=K, V=V, dtype=name)


@pytest.fixture
def compiled():
    """Compiles with a counter of graphs; dynamo's caches are emptied before and after."""
    torch._dynamo.reset()
    yield lambda function, backend="aot_eager": _compile(function, backend)
    torch._dynamo.reset()


def _compile(function: Callable, backend: str) -> tuple[Callable, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, dynamic=True, backend=counter), counter


def op(q, k, v, g, beta, initial_state, cu_seqlens):
    """What a layer does around the op, so that the graph holds more than one node."""
    o, state = chunk_gated_delta_rule(
        *(2 * q, k, v, g, beta),
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        output_final_state=True,
    )
    return o + v, state


def bare(q, k, v, g, beta, initial_state, cu_seqlens):
    """The op alone, for which inductor needs no C++ compiler."""
    return chunk_gated_delta_rule(
        *(q, k, v, g, beta),
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        output_final_state=True,
        save="full",
    )


def both_ways(function, work: Workload, machine: Machine = MACHINES[0]) -> Results:
    """Outputs and gradients of a function with op's signature."""
    x, cotangents = machine.inputs(work), machine.cotangents(work)
    leaves = [getattr(x, name).clone().requires_grad_() for name in LEAVES]
    outputs = function(*leaves, x.cu_seqlens)
    found = torch.autograd.grad(outputs, leaves, cotangents)
    return Results(*(y.detach() for y in outputs), *found)


SHAPES = [
    Workload(lengths=(64,), tail=0),
    Workload(lengths=(65,), tail=0),
    Workload(lengths=(300, 0, 1, 90, 609), tail=7),  # several documents, one of them split
]


def test_a_compiled_call_gives_the_bits_of_an_eager_one_for_every_shape(machine, compiled):
    function, counter = compiled(op)  # backend "auto": the machine's where it takes the problem
    for work in SHAPES:
        found = both_ways(function, work, machine)
        assert_bitwise(found, both_ways(op, work, machine))
    assert counter.frame_count <= 2


def test_a_call_compiled_by_inductor_gives_the_bits_of_an_eager_one(compiled):
    function, counter = compiled(bare, "inductor")
    for work in SHAPES:
        assert_bitwise(both_ways(function, work), both_ways(bare, work))
    assert counter.frame_count <= 2


def test_random_packings_compile_a_handful_of_times(compiled):
    function, counter = compiled(op)
    draw = random.Random(7)
    for step in range(20):
        lengths = tuple(draw.randrange(1, 90) for _ in range(draw.randrange(1, 6)))
        work = Workload(lengths=lengths, tail=draw.randrange(3), K=4, V=4, HV=2, seed=step)
        found = both_ways(function, work)
        if step % 5 == 0:
            assert_bitwise(found, both_ways(op, work))
    # One graph, and at most one more each for T, N and the tail at the values 0 and 1.
    assert counter.frame_count <= 4


def test_boundaries_of_another_content_need_no_new_graph(compiled):
    function, counter = compiled(op)
    works = [Workload(lengths=lengths, tail=0) for lengths in ((50, 70), (119, 1), (0, 120))]
    for work in works:
        assert_bitwise(both_ways(function, work), both_ways(op, work))
    assert counter.frame_count == 1


def test_a_batch_without_boundaries_compiles_and_keeps_its_bits(compiled):
    function, counter = compiled(lambda *given: bare(*given[:6], None))
    for tokens in (70, 130, 600):
        work = replace(NAMED["mild"], lengths=(tokens,), tail=0)
        out = both_ways(function, work)
        inputs, cotangents = work.inputs(torch.float32), work.cotangents(torch.float32)
        assert_bitwise(out, evaluate(inputs.with_(cu_seqlens=None), cotangents))
    assert counter.frame_count == 1


def test_a_compiled_call_without_gradients_runs_and_keeps_its_bits(compiled):
    function, _ = compiled(op)
    x = NAMED["mild"].inputs(torch.float32)
    given = [getattr(x, name) for name in LEAVES]
    with torch.no_grad():
        found = function(*given, x.cu_seqlens)
    for y, z in zip(found, op(*given, x.cu_seqlens), strict=True):
        assert torch.equal(y, z)


def test_a_compiled_call_refuses_wrong_shapes_by_name(compiled):
    function, _ = compiled(op)
    x = NAMED["mild"].inputs(torch.float32)
    given = [getattr(x, name) for name in LEAVES]
    given[3] = given[3][..., :1]
    # The dynamo of torch 2.11 quotes an error in the pieces that it traced.
    with pytest.raises(Exception, match=r"g('\), ConstantVariable\(str: ')? must be"):
        function(*given, x.cu_seqlens)


class Seen(TorchDispatchMode):
    """Names of the operators that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def step() -> tuple[torch.Tensor, ...]:
    """o, the final state and gradients of one call of the op."""
    x = NAMED["mild"].inputs(torch.float32)
    leaves = [getattr(x, name).clone().requires_grad_() for name in LEAVES]
    *five, state = leaves
    o, final_state = chunk_gated_delta_rule(
        *five, initial_state=state, cu_seqlens=x.cu_seqlens, output_final_state=True
    )
    return o, final_state, *torch.autograd.grad((o.square().sum() + final_state.sum()), leaves)


def test_operator_is_seen_by_a_mode_and_leaves_the_bits_of_a_direct_call():
    with Seen() as seen:
        looked_on = step()
    assert {"longdelta::forward", "longdelta::backward"} <= set(seen.names)
    for a, b in zip(step(), looked_on, strict=True):
        assert torch.equal(a, b)


def test_operator_is_seen_by_the_profiler_and_by_a_subclass():
    with torch.profiler.profile() as profile:
        step()
    assert "longdelta::forward" in {event.name for event in profile.events()}

    class Named(torch.Tensor):
        seen: ClassVar[list[str]] = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    x = NAMED["mild"].inputs(torch.float32)
    five = [getattr(x, name) for name in LEAVES[:5]]
    found, _ = chunk_gated_delta_rule(five[0].as_subclass(Named), *five[1:])
    assert any("longdelta.forward" in name for name in Named.seen)
    assert torch.equal(found.as_subclass(torch.Tensor), chunk_gated_delta_rule(*five)[0])


def test_direct_calls_do_not_walk_through_the_dispatcher(machine, monkeypatch):
    work = NAMED["mild"]
    inputs, cotangents = machine.inputs(work), machine.cotangents(work)
    for name in ("forward", "backward"):
        monkeypatch.setattr(torch.ops.longdelta, name, None, raising=False)
    assert all(x.isfinite().all() for x in machine.evaluate(inputs, cotangents))


def plain_inputs(**changes: torch.Tensor):
    x = NAMED["mild"].inputs(torch.float32)
    given = {name: getattr(x, name) for name in LEAVES} | changes
    return inputs_of(**given, cu_seqlens=x.cu_seqlens)


def lazily(name: str) -> torch.Tensor:
    x = NAMED["mild"].inputs(torch.float32)
    if name == "negated":
        return torch.complex(torch.zeros_like(x.g), -x.g).conj().imag
    return torch._efficientzerotensor(x.g.shape, dtype=x.g.dtype)


@pytest.mark.parametrize("name", ["negated", "zero"])
def test_lazy_tensors_are_made_real_by_the_dispatcher(name, monkeypatch):
    """A kernel would read the memory that they do not have, or not as it is."""
    inputs = plain_inputs(g=lazily(name))
    reached = []
    implementation = library._forward_impl

    def seen(*arguments, **options):
        reached.append(arguments[3])
        return implementation(*arguments, **options)

    monkeypatch.setattr(library, "_forward_impl", seen)
    assert not dispatch.plain(inputs[: library._TENSORS])
    o, *_ = library.call(inputs)
    assert torch.equal(o, library.call(plain_inputs(g=lazily(name).clone()))[0])
    assert len(reached) == 1  # the dispatcher has the implementation that was registered


NOT_LOOKED_ON = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "a forward-mode level": torch.autograd.forward_ad.dual_level,
}
LOOKED_ON = {
    "mode": Seen,
    "below autograd": torch._C._AutoDispatchBelowAutograd,
    "profiler": torch.profiler.profile,
    "function mode": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("context", NOT_LOOKED_ON.values(), ids=NOT_LOOKED_ON)
def test_calls_are_direct_where_nobody_looks_on(context, monkeypatch):
    monkeypatch.setattr(torch.ops.longdelta, "forward", None, raising=False)
    with context():
        assert library.call(plain_inputs())[0].isfinite().all()


@pytest.mark.parametrize("context", LOOKED_ON.values(), ids=LOOKED_ON)
def test_calls_pass_through_the_dispatcher_where_somebody_does(context):
    inputs = plain_inputs()
    direct = library.call(inputs)[0]
    with context():
        assert dispatch.looked_on()
        o = library.call(inputs)[0]
    assert torch.equal(o, direct)


def test_transforms_are_seen_from_inside():
    inside = []

    def f(x):
        inside.append(dispatch.looked_on())
        return x.sum()

    torch.func.vmap(f)(torch.zeros(2, 3))
    torch.func.grad(f)(torch.zeros(2))
    assert inside == [True, True]


def test_output_has_no_graph_below_autograd():
    x = NAMED["mild"].inputs(torch.float32)
    leaves = [getattr(x, name).clone().requires_grad_() for name in LEAVES]
    inputs = inputs_of(*leaves[:5], initial_state=leaves[5], cu_seqlens=x.cu_seqlens)
    assert library.call(inputs)[0].requires_grad
    with torch._C._AutoDispatchBelowAutograd():
        assert not library.call(inputs)[0].requires_grad
