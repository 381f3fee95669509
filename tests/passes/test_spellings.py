"""Part of pass 1: each spelling gives the numbers of PyTorch's own, in operators that later passes know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from selective_compile.passes.contraction import contraction_of
from selective_compile.passes.spellings import SPELT_OUT, named_dimensions

aten = torch.ops.aten
SIZES = {letter: size for size, letter in enumerate("abcde", 2)}


def traced(function: Callable[..., Any], *tensors: Tensor) -> fx.GraphModule:
    with torch.no_grad():
        return make_fx(function, SPELT_OUT, tracing_mode="fake", pre_dispatch=True)(*tensors)


def operators(module: fx.GraphModule) -> set[Any]:
    return {node.target.overloadpacket for node in module.graph.nodes if hasattr(node.target, "overloadpacket")}


@st.composite
def equations(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]]]:
    """Up to four operands, some with dots, and a result that is named or not."""
    leading = draw(st.integers(0, 2))
    inputs, shapes = [], []
    for _ in range(draw(st.integers(1, 4))):
        letters = draw(st.lists(st.sampled_from("abcde"), max_size=3, unique=draw(st.booleans())))
        dots = draw(st.booleans())
        own = draw(st.integers(0, leading)) if dots else 0
        inputs.append("..." * dots + "".join(letters))
        shapes.append((*(3, 2)[2 - own :], *(SIZES[letter] for letter in letters)))
    given_letters = sorted(set("".join(inputs)) - {"."})
    if draw(st.booleans()):
        return ",".join(inputs), shapes
    out = draw(st.lists(st.sampled_from(given_letters), unique=True)) if given_letters else []
    return f"{' , '.join(inputs)} -> {'...' * any('...' in letters for letters in inputs)}{''.join(out)}", shapes


@given(equations())
def test_an_einsum_is_one_or_several_of_two_operands_with_the_same_result(case: tuple[str, Any]) -> None:
    equation, shapes = case
    operands = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    module = traced(lambda *given: torch.einsum(equation, *given), *operands)
    torch.testing.assert_close(module(*operands), torch.einsum(equation, *operands))
    assert all(contraction_of(node) for node in module.graph.nodes if node.target is aten.einsum.default)


def test_dots_get_letters_that_the_equation_does_not_have() -> None:
    assert named_dimensions("...ab,b...", [4, 2]) == (["cdab", "bd"], "cda")
    assert named_dimensions("i ... , j -> j ...", [2, 1]) == (["ia", "j"], "ja")


SPELLINGS: dict[str, tuple[Callable[..., Any], Any]] = {
    "swapaxes": (lambda x: x.swapaxes(0, 1), aten.transpose),
    "movedim": (lambda x: x.movedim(0, 2), aten.permute),
    "tile": (lambda x: x.tile(2), aten.repeat),
    "prelu": (lambda x: F.prelu(x, x[0, :, 0]), aten._prelu_kernel),
    "a row in each place": (lambda x: overwritten(x.clone(), x[..., 0] > 0, x[0, 0]), aten.where),
    "a number in each place": (lambda x: overwritten(x.clone(), x > 0, torch.tensor(0.5)), aten.masked_fill),
    "type of another": (lambda x: (x > 0).type_as(x), aten.to),
    "not in place": (lambda x: x.index_put((x > 0,), torch.tensor(0.5)), aten.masked_fill),
    "convolution of one token": (lambda x: F.conv1d(x, x.new_ones(2, 4, 1)), aten.matmul),
    "norm of groups": (lambda x: F.group_norm(x, 2, x[0, :, 0], x[0, :, 1]), aten.layer_norm),
    "norm of channels": (lambda x: F.batch_norm(x, x[0, :, 0], x[1, :, 0].abs(), x[0, :, 1], x[0, :, 2]), aten.rsqrt),
    "norm of channels without weights": (lambda x: F.batch_norm(x, x[0, :, 0], x[1, :, 0].abs()), aten.rsqrt),
    "norm of channels in 16 bits": (lambda x: of_channels(x.bfloat16(), x[0, :, 0], x[1, :, 0].abs()), aten.rsqrt),
    "norm of channels of each": (lambda x: of_each(x, x[0, :, 0], x[1, :, 0].abs()), aten.rsqrt),
    "matrix norm": (lambda x: torch.linalg.matrix_norm(x), aten.linalg_vector_norm),
}


def of_channels(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return F.batch_norm(x, mean, variance, weight=mean, bias=variance)


def of_each(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return F.instance_norm(x, mean, variance, weight=mean, bias=variance, use_input_stats=False)


def overwritten(x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    x[mask] = values
    return x


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_traced_as_what_it_means(name: str) -> None:
    function, operator = SPELLINGS[name]
    x = torch.randn(3, 4, 3)
    module = traced(function, x)
    assert operator in operators(module)
    torch.testing.assert_close(module(x), function(x))


LEFT_ALONE: dict[str, tuple[Callable[..., Any], Any]] = {
    "convolution of several tokens": (lambda x: F.conv1d(x, x.new_ones(2, 4, 2)), aten.conv1d),
    "convolution of groups": (lambda x: F.conv1d(x, x[0, :, :1, None], groups=4), aten.conv1d),
    "convolution of padding": (lambda x: F.conv1d(x, x.new_ones(2, 4, 1), padding=1), aten.conv1d),
    "norm of channels by these": (lambda x: F.batch_norm(x, None, None, training=True), aten.batch_norm),
    "norm of channels of each by these": (lambda x: F.instance_norm(x), aten.instance_norm),
    "norm of channels that it keeps": (
        lambda x: F.batch_norm(x, x[0, :, 0].clone(), x[1, :, 0].abs(), training=True),
        aten.batch_norm,
    ),
    "rows in turn": (lambda x: x.index_put((x[..., 0] > 9,), x[0, :0]), aten.index_put),
    "sums": (lambda x: x.index_put((x > 0,), torch.tensor(0.5), accumulate=True), aten.index_put),
    "integers in place of others": (lambda x: torch.where(x > 0, 1, x.long()), aten.where),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_means_more_is_left_alone(name: str) -> None:
    function, operator = LEFT_ALONE[name]
    assert operator in operators(traced(function, torch.randn(3, 4, 3)))
