"""A function is what it computes: recurrences are recognised under any name and order, and near misses are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.xlstm.modeling_xlstm import (
    mlstm_chunkwise_native_autograd,
    mlstm_recurrent_sequence_native,
    mlstm_recurrent_step_native,
    wrap_chunkwise_arbitrary_sequence_length,
)

from selective_compile.passes.constant_arguments import kept
from selective_compile.passes.recurrence_match import Signature, TensorArgument, explains, recognise_function

LENGTH = 37


def signature(function_takes: dict[str, Any], result: tuple[int, ...], **constants: Any) -> Signature:
    """Of shapes with ``LENGTH`` where the tokens are."""

    def described(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> TensorArgument:
        token_dim = shape.index(LENGTH) if LENGTH in shape else None
        return TensorArgument(name=name, shape=shape, dtype=dtype, token_dim=token_dim)

    return Signature(
        tensors=tuple(described(name, shape) for name, shape in function_takes.items()),
        constants=tuple(constants.items()),
        result=described("", result),
        returned=None,
        device=torch.device("cpu"),
    )


def delta(
    later: Tensor, b: Tensor, first: Tensor, k: Tensor, forget: Tensor, *, chunk: int = 0, order: int = 1
) -> Tensor:
    """The gated delta rule, its arguments named and ordered as nobody does; ``chunk`` plants a lost state."""
    state = torch.zeros(1, later.shape[2], k.shape[3], later.shape[3])
    outputs = []
    for t in range(k.shape[1])[::order]:
        if chunk and t % chunk == 0:
            state = torch.zeros_like(state)
        state = state * forget[:, t, :, None, None].exp()
        read = (state * k[:, t, ..., None]).sum(2)
        state = state + k[:, t, ..., None] * ((later[:, t] - read) * b[:, t, :, None])[:, :, None]
        outputs.append((state * first[:, t, ..., None]).sum(2))
    return torch.stack(outputs[::order], 1)


DELTA_SHAPES = {
    "later": (1, LENGTH, 2, 6),
    "b": (1, LENGTH, 2),
    "first": (1, LENGTH, 2, 4),
    "k": (1, LENGTH, 2, 4),
    "forget": (1, LENGTH, 2),
}


def test_gated_delta_rule_under_any_names() -> None:
    found = recognise_function(delta, signature(DELTA_SHAPES, DELTA_SHAPES["later"]))
    assert found is not None and found.family.name == "gated delta rule"
    assert dict(found.roles) == {"query": 2, "key": 3, "value": 0, "decay": 4, "beta": 1}
    assert dict(found.options) == {"normalised": False, "scaled": False}
    assert found.state_shape() == (2, 4, 6)


@pytest.mark.parametrize("planted", [{"chunk": 64}, {"chunk": 256}, {"order": -1}])
def test_lost_state_and_reversed_order_are_not_recognised(planted: dict[str, int]) -> None:
    assert recognise_function(delta, signature(DELTA_SHAPES, DELTA_SHAPES["later"], **planted)) is None


CLAMPS: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "decay kept above -2": {"forget": lambda x: x.clamp(min=-2)},
    "decay kept above -8": {"forget": lambda x: x.clamp(min=-8)},
    "beta kept below 0.999": {"b": lambda x: x.clamp(max=0.999)},
    "beta kept above 0.001": {"b": lambda x: x.clamp(min=0.001)},
    "values kept below 20": {"later": lambda x: x.clamp(-20, 20)},
    "tiny values dropped": {"later": lambda x: x * (x.abs() > 1e-4)},
}


@pytest.mark.parametrize("name", CLAMPS)
def test_a_clamp_that_usual_values_do_not_meet_is_seen(name: str) -> None:
    def clamped(**given: Tensor) -> Tensor:
        return delta(**{key: CLAMPS[name].get(key, lambda x: x)(value) for key, value in given.items()})

    assert recognise_function(clamped, signature(DELTA_SHAPES, DELTA_SHAPES["later"])) is None


def selective(u: Tensor, step: Tensor, a: Tensor, into: Tensor, out: Tensor, skip: Tensor, *, ahead: int = 0) -> Tensor:
    """Mamba's scan over ``[1, I, S]``; ``ahead`` reads a later token's output weights."""
    state = torch.zeros(1, u.shape[1], a.shape[1])
    step, outputs = F.softplus(step), []
    out = out.roll(-ahead, 1)
    for t in range(u.shape[2]):
        state = (step[:, :, t, None] * a).exp() * state + (step[:, :, t] * u[:, :, t])[..., None] * into[:, t, None]
        outputs.append((state * out[:, t, None]).sum(2) + skip * u[:, :, t])
    return torch.stack(outputs, 2)


SCAN_SHAPES = {
    "u": (1, 6, LENGTH),
    "step": (1, 6, LENGTH),
    "a": (6, 3),
    "into": (1, LENGTH, 3),
    "out": (1, LENGTH, 3),
    "skip": (6,),
}


def test_selective_scan_with_its_options() -> None:
    found = recognise_function(selective, signature(SCAN_SHAPES, SCAN_SHAPES["u"]))
    assert found is not None and found.family.name == "selective_scan"
    assert dict(found.roles)["B"] == 3 and dict(found.roles)["C"] == 4
    assert dict(found.options)["softplus"] is True


def test_scan_that_reads_ahead_is_not_recognised() -> None:
    assert recognise_function(selective, signature(SCAN_SHAPES, SCAN_SHAPES["u"], ahead=1)) is None


def limited(
    x: Tensor, pace: Tensor, fade: Tensor, into: Tensor, out: Tensor, *, limits: Any, used: type | None = None
) -> Tensor:
    """Mamba-2's scan with several groups and its time step in ``limits``, heeded if they are ``used`` or it is None."""
    if used is None or type(limits) is used:
        pace = pace.clamp(*limits)
    into, out = (each.repeat_interleave(x.shape[2] // each.shape[2], 2) for each in (into, out))
    state, outputs = torch.zeros(1, *x.shape[2:], into.shape[3]), []
    for t in range(x.shape[1]):
        update = (pace[:, t, :, None] * x[:, t])[..., None] * into[:, t, :, None]
        state = (pace[:, t] * fade).exp()[..., None, None] * state + update
        outputs.append((state * out[:, t, :, None]).sum(-1))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("ahead", [0, 1])
def test_rounding_of_what_was_given_is_allowed_for_where_float32_comes_back(ahead: int) -> None:
    """As of Mamba, where a weight is left in float32: what is computed in bfloat16 is added to it."""
    wide = signature(SCAN_SHAPES, SCAN_SHAPES["u"])
    narrow = [replace(tensor, dtype=torch.bfloat16) for tensor in wide.tensors[:-1]]
    found = recognise_function(selective, replace(wide, tensors=(*narrow, wide.tensors[-1])))
    assert found is not None
    given = {each.name: torch.randn(each.shape).to(each.dtype) for each in found.signature.tensors}
    given["a"] = -given["a"].abs()
    output = selective(**given, ahead=ahead)
    assert output.dtype is torch.float32 and explains(found, given, output) is (ahead == 0)


SSD_SHAPES = {
    "x": (1, LENGTH, 4, 6),
    "pace": (1, LENGTH, 4),
    "fade": (4,),
    "into": (1, LENGTH, 2, 3),
    "out": (1, LENGTH, 2, 3),
}


@pytest.mark.parametrize("limits", [(0.1, 0.7), [0.1, 0.7], [0.0, float("inf")]])
def test_limits_of_the_time_step_may_be_a_list_as_in_json(limits: Any) -> None:
    found = recognise_function(limited, signature(SSD_SHAPES, SSD_SHAPES["x"], limits=kept(limits)))
    assert found is not None and found.family.name == "ssd"
    assert dict(found.options) == {"softplus": False, "limits": tuple(limits)}


@pytest.mark.parametrize(("limits", "expected"), [([0.1, 0.7], None), ((0.1, 0.7), (0.1, 0.7))])
def test_a_function_that_tells_lists_from_tuples_is_given_what_the_model_gives(limits: Any, expected: Any) -> None:
    found = recognise_function(limited, signature(SSD_SHAPES, SSD_SHAPES["x"], limits=kept(limits), used=tuple))
    assert found is not None and dict(found.options)["limits"] == expected


def averaged(x: Tensor, y: Tensor) -> Tensor:
    return x.cumsum(1) * y


def token_wise(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def raising(x: Tensor, y: Tensor) -> Tensor:
    raise RuntimeError("not for these")


@pytest.mark.parametrize("function", [averaged, token_wise, raising])
def test_functions_of_the_right_shapes_that_compute_something_else(function: Callable[..., Tensor]) -> None:
    shapes = {"x": (1, LENGTH, 5), "y": (1, LENGTH, 5)}
    assert recognise_function(function, signature(shapes, (1, LENGTH, 5))) is None


MLSTM_SHAPES = {
    "query": (1, 2, LENGTH, 4),
    "key": (1, 2, LENGTH, 4),
    "value": (1, 2, LENGTH, 4),
    "igate": (1, 2, LENGTH),
    "fgate": (1, 2, LENGTH),
}


def matrix_memory(eps: float, **given: Tensor) -> Any:
    """xLSTM's own, in chunks of 16 and what is left of them token by token."""
    return wrap_chunkwise_arbitrary_sequence_length(
        mlstm_chunkwise_native_autograd,
        mlstm_recurrent_sequence_native,
        mlstm_recurrent_step_native,
        **given,
        eps=eps,
        chunk_size=16,
    )


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-4, 0.0])
def test_what_a_sum_is_divided_by_is_told_by_what_comes_back(eps: float) -> None:
    like = replace(signature(MLSTM_SHAPES, MLSTM_SHAPES["value"]), returned=2)
    found = recognise_function(partial(matrix_memory, eps), like)
    assert found is not None and found.family.name == "mlstm"
    assert dict(found.roles) == {"query": 0, "key": 1, "value": 2, "input_gate": 3, "forget_gate": 4}
    assert dict(found.options) == {"scaled": True, "eps": eps}
    assert found.state_shape() == (2, 5, 5)


def test_a_memory_that_is_divided_by_another_sum_is_not_recognised() -> None:
    like = replace(signature(MLSTM_SHAPES, MLSTM_SHAPES["value"]), returned=2)
    assert recognise_function(partial(matrix_memory, 3e-6), like) is None
