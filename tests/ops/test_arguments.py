"""Bad calls: the message names the argument, says what it must be and what came."""

import warnings

import pytest
import torch

from longdelta import (
    InvalidInput,
    NotYet,
    UnsupportedProblem,
    arguments,
    chunk_gated_delta_rule,
    gdn_backward,
    gdn_forward,
)
from longdelta.ops import library

B, T, H, HV, K, V = 1, 6, 2, 4, 3, 5


def good(**changes):
    call = {
        "q": torch.ones(B, T, H, K),
        "k": torch.ones(B, T, H, K),
        "v": torch.ones(B, T, HV, V),
        "g": -torch.ones(B, T, HV),
        "beta": torch.ones(B, T, HV),
    }
    return call | changes


def batch(*names, size=2):
    """The named tensors of a good call with B = 2."""
    call = good()
    return {name: call[name].expand(size, *call[name].shape[1:]) for name in names}


ALL = ("q", "k", "v", "g", "beta")

BAD = [
    # argument, changed call, what the message must say came
    ("q", {"q": torch.ones(T, H, K)}, "[6, 2, 3]"),
    ("q", {"q": None}, "NoneType"),
    ("q", {"q": torch.ones(B, T, H, K, dtype=torch.int32)}, "torch.int32"),
    ("q", {"q": torch.ones(B, T, 0, K), "k": torch.ones(B, T, 0, K)}, "[1, 6, 0, 3]"),
    ("k", {"k": torch.ones(B, T, H, K + 1)}, "[1, 6, 2, 4]"),
    ("k", {"k": torch.ones(B, T, H, K).half()}, "torch.float16"),
    ("k", {"k": torch.ones(B, T, H, K, device="meta")}, "meta"),
    ("v", {"v": torch.ones(B, T + 1, HV, V)}, "[1, 7, 4, 5]"),
    ("v", {"v": torch.ones(B, T, HV, V).double()}, "torch.float64"),
    ("v", {"v": torch.ones(B, T, 3, V)}, "HV = 3, H = 2"),
    ("v", {"v": torch.ones(B, T, HV)}, "[1, 6, 4]"),
    ("v", {"v": [1.0]}, "list"),
    ("g", {"g": torch.ones(B, T, H)}, "[1, 6, 2]"),
    ("g", {"g": torch.ones(B, T, HV, dtype=torch.int64)}, "torch.int64"),
    ("g", {"g": None}, "NoneType"),
    ("g", {"g": torch.ones(B, T, HV, device="meta")}, "meta"),
    ("beta", {"beta": torch.ones(B, T, HV, V)}, "[1, 6, 4, 5]"),
    ("beta", {"beta": torch.ones(B, T, HV, dtype=torch.bool)}, "torch.bool"),
    ("initial_state", {"initial_state": torch.ones(1, HV, V, K)}, "[1, 4, 5, 3]"),
    (
        "initial_state",
        {"initial_state": torch.ones(1, HV, K, V), "state_v_first": True},
        "[1, 4, 3, 5]",
    ),
    (
        "initial_state",
        {"initial_state": torch.ones(1, HV, K, V), "cu_seqlens": torch.tensor([0, 2, 6])},
        "[1, 4, 3, 5]",
    ),
    ("initial_state", {"initial_state": 0.0}, "float"),
    ("scale", {"scale": "0.5"}, "str"),
    ("scale", {"scale": True}, "bool"),
    ("cu_seqlens", {"cu_seqlens": [0, 6]}, "list"),
    ("cu_seqlens", {"cu_seqlens": torch.tensor([[0, 6]])}, "[1, 2]"),
    ("cu_seqlens", {"cu_seqlens": torch.tensor([], dtype=torch.int64)}, "[0]"),
    ("cu_seqlens", {"cu_seqlens": torch.tensor([0.0, 6.0])}, "torch.float32"),
    ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 6], device="meta")}, "meta"),
    ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 4, 2])}, "4 is followed by 2"),
    ("cu_seqlens", {"cu_seqlens": torch.tensor([1, 6])}, "is 1"),
    ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 7])}, "7"),
    ("cu_seqlens", batch(*ALL) | {"cu_seqlens": torch.tensor([0, 6])}, "B = 2"),
    ("cu_seqlens_cpu", batch(*ALL) | {"cu_seqlens_cpu": torch.tensor([0, 6])}, "B = 2"),
    ("cu_seqlens_cpu", {"cu_seqlens_cpu": torch.tensor([0, 6], device="meta")}, "meta"),
    (
        "cu_seqlens_cpu",
        {"cu_seqlens": torch.tensor([0, 2, 6]), "cu_seqlens_cpu": torch.tensor([0, 3, 6])},
        "[0, 3, 6]",
    ),
    ("scale", {"scale": float("nan")}, "nan"),
    (
        "cu_seqlens_cpu",
        {"cu_seqlens": torch.tensor([0, 6]), "cu_seqlens_cpu": torch.tensor([0, 3, 6])},
        "[3]",
    ),
    ("A_log", {"use_gate_in_kernel": True}, "NoneType"),
    ("A_log", {"use_gate_in_kernel": True, "A_log": torch.ones(H)}, "[2]"),
    ("A_log", {"A_log": torch.ones(HV)}, "False"),
    (
        "dt_bias",
        {"use_gate_in_kernel": True, "A_log": torch.ones(HV), "dt_bias": torch.ones(1)},
        "[1]",
    ),
    ("allow_neg_eigval", {"allow_neg_eigval": True}, "use_beta_sigmoid_in_kernel"),
    ("use_qk_l2norm_in_kernel", {"use_qk_l2norm_in_kernel": 1}, "1"),
    ("use_beta_sigmoid_in_kernel", {"use_beta_sigmoid_in_kernel": None}, "None"),
    ("use_gate_in_kernel", {"use_gate_in_kernel": "yes"}, "'yes'"),
    ("output_final_state", {"output_final_state": 2}, "2"),
    ("state_v_first", {"state_v_first": "no"}, "'no'"),
    ("deterministic", {"deterministic": None}, "None"),
    ("save", {"save": "everything"}, "'everything'"),
    ("backend", {"backend": "cutlass"}, "'cutlass'"),
    ("graph", {"graph": "on"}, "'on'"),
    ("cp_context", {"cp_context": 3}, "int"),
    ("recompute", {"recompute": 3}, "int"),
    ("head_first", {"head_first": True}, "True"),
    ("use_qk_l2norm", {"use_qk_l2norm": True}, "bool"),
    ("attention_mask", {"attention_mask": torch.ones(1, 6)}, "Tensor"),
    ("lower_bound", {"lower_bound": -5.0}, "float"),
    ("use_qk_l2norm_in_kernel", {"use_qk_l2norm_kernel": True}, "'use_qk_l2norm_kernel'"),
    ("cu_seqlens", {"cu_seqlen": None}, "'cu_seqlen'"),
    ("initial_state", {"initial_states": None}, "'initial_states'"),
    ("A_log", {"a_log": None}, "'a_log'"),
]
IDS = [f"{name}-{came}" for name, _, came in BAD]


@pytest.mark.parametrize(("name", "changes", "came"), BAD, ids=IDS)
def test_a_bad_call_is_refused_with_the_arguments_name_and_what_came(name, changes, came):
    with pytest.raises(InvalidInput) as error:
        chunk_gated_delta_rule(**good(**changes))
    assert isinstance(error.value, ValueError)
    assert name in str(error.value)
    assert came in str(error.value)


@pytest.mark.parametrize(("name", "changes", "came"), BAD, ids=IDS)
def test_the_explicit_calls_refuse_the_same(name, changes, came):
    with pytest.raises(InvalidInput, match=name):
        gdn_forward(**good(**changes))
    if name != "save":  # the backward takes the forward's
        with pytest.raises(InvalidInput, match=name):
            gdn_backward(None, None, **good(**changes))


def test_a_state_is_checked_against_the_number_of_documents_before_anything_runs(monkeypatch):
    def fail(*_):
        raise AssertionError("reached the operator")

    monkeypatch.setattr(library, "_forward_impl", fail)
    with pytest.raises(InvalidInput, match="initial_state"):
        chunk_gated_delta_rule(**good(initial_state=torch.ones(2, HV, K, V)))


@pytest.mark.parametrize(
    "extra",
    [
        {"chunk_size": 32},
        {"max_length": 7, "seq_idx": None, "use_cache": False},
        {"cu_seq_lens_q": torch.tensor([0, 6]), "cu_seqlens": torch.tensor([0, 6])},
        {"head_first": False, "transpose_state_layout": False},
        {"chunk_indices": torch.zeros(1, 2)},
        {"attention_mask": None, "use_exotic_kernel": False},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_keywords_of_model_code_change_nothing_and_say_nothing(extra):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        o, _ = chunk_gated_delta_rule(**good(), **extra)
    assert torch.equal(o, chunk_gated_delta_rule(**good())[0])


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "offsets"])
def test_keywords_that_tell_documents_apart_need_cu_seqlens(name):
    with pytest.raises(InvalidInput, match=f"{name} must come with cu_seqlens.*Tensor"):
        chunk_gated_delta_rule(**good(), **{name: torch.tensor([0, 6])})


def test_an_unknown_keyword_is_ignored_with_one_warning_that_names_it(monkeypatch):
    monkeypatch.setattr(arguments, "_said", set())
    with pytest.warns(UserWarning, match="'colour' is not an option"):
        o, _ = chunk_gated_delta_rule(**good(), colour="red")
    assert torch.equal(o, chunk_gated_delta_rule(**good())[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunk_gated_delta_rule(**good(), colour="red")


def test_transpose_state_layout_means_state_v_first():
    call = good(v=torch.ones(B, T, HV, K + 1))
    _, v_first = chunk_gated_delta_rule(**call, output_final_state=True, state_v_first=True)
    _, old_name = chunk_gated_delta_rule(
        **call, output_final_state=True, transpose_state_layout=True
    )
    assert torch.equal(old_name, v_first)
    assert old_name.shape[-2:] == (K + 1, K)


@pytest.mark.parametrize(("name", "value"), [("workspace", object()), ("graph", "replay")])
def test_arguments_of_a_later_version_say_so(name, value):
    with pytest.raises(NotYet, match=f"{name}.* is not implemented in this version"):
        chunk_gated_delta_rule(**good(), **{name: value})
    with pytest.raises(NotImplementedError, match=name):
        gdn_forward(**good(), **{name: value})


def test_a_backend_that_cannot_run_here_is_refused_with_its_reason():
    with pytest.raises(UnsupportedProblem, match=r"backend='gluon' cannot run this: .*needs"):
        chunk_gated_delta_rule(**good(), backend="gluon")


def test_wide_parameters_next_to_narrow_inputs_are_taken():
    narrow = {name: good()[name].bfloat16() for name in ("q", "k", "v")}
    o, state = chunk_gated_delta_rule(**good(**narrow), output_final_state=True)
    wide, _ = chunk_gated_delta_rule(**good())
    assert o.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert torch.equal(o, wide.bfloat16())


def test_positive_gates_are_computed_as_they_stand():
    g = torch.full((B, T, HV), 0.5)
    call = good(g=g, beta=torch.zeros(B, T, HV))
    state = torch.ones(1, HV, K, V)
    _, final_state = chunk_gated_delta_rule(**call, initial_state=state, output_final_state=True)
    assert torch.equal(final_state, torch.exp(torch.tensor(0.5 * T)) * state)
