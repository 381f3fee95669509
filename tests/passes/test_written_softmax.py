"""Part of pass 1: a softmax written out is that operator, and what is written almost so stays as it is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from selective_compile.passes.functional import make_functional
from selective_compile.passes.normalise import tidy
from selective_compile.passes.spellings import SPELT_OUT
from selective_compile.passes.written_softmax import fold_softmaxes
from tests.decoders import HEAD_SIZE, VOCABULARY, Decoder, repeated
from tests.exactness import TOLERANCE, engine_error

aten = torch.ops.aten
Function = Callable[[Tensor], Tensor]
SCORES = torch.tensor([[1.0, 200.0, -1e9], [-math.inf, 0.0, -math.inf], [0.0, 1.0, -math.inf]])


def by_values(x: Tensor) -> Tensor:
    raised = torch.exp(x - x.max(dim=-1, keepdim=True).values)
    return raised / raised.sum(dim=-1, keepdim=True)


def by_amax(x: Tensor) -> Tensor:
    raised = (x - x.amax(1, keepdim=True)).exp()
    return raised / raised.sum(-1, keepdim=True)


def along_the_first(x: Tensor) -> Tensor:
    raised = (x - x.amax(0, True)).exp()
    return raised / raised.sum(0, True)


WRITTEN: dict[str, Function] = {
    "values": by_values,
    "amax": by_amax,
    "along the first": along_the_first,
    "by the logarithm of the sum": lambda x: (x - x.logsumexp(-1, True)).exp(),
    "by the logarithm of the sum along the first": lambda x: torch.exp(x - torch.logsumexp(x, [0], keepdim=True)),
    "by logarithms": lambda x: x.log_softmax(-1).exp(),
    "by logarithms along the first": lambda x: torch.exp(torch.log_softmax(x, 0)),
}
OTHERS: dict[str, Function] = {
    "one more": lambda x: (e := (x - x.amax(-1, True)).exp()) / (1 + e.sum(-1, True)),
    "nothing taken off": lambda x: (e := x.exp()) / e.sum(-1, True),
    "the largest of all": lambda x: (e := (x - x.max()).exp()) / e.sum(-1, True),
    "the largest of others": lambda x: (e := (x - (x + 1).amax(-1, True)).exp()) / e.sum(-1, True),
    "the largest along another": lambda x: (e := (x - x.amax(0, True)).exp()) / e.sum(-1, True),
    "the sum along another": lambda x: (e := (x - x.amax(-1, True)).exp()) / e.sum(0, True),
    "the sum of others": lambda x: (x - x.amax(-1, True)).exp() / (2 * x).exp().sum(-1, True),
    "a sum that is not kept": lambda x: (e := (x - x.amax(-1, True)).exp()) / e.sum(-1),
    "taken off twice": lambda x: (e := torch.sub(x, x.amax(-1, True), alpha=2).exp()) / e.sum(-1, True),
    "the logarithm of the sum along another": lambda x: (x - x.logsumexp(-1)).exp(),
    "the logarithm of the sum of others": lambda x: (x - (2 * x).logsumexp(-1, True)).exp(),
    "the logarithm of the sum of all": lambda x: (x - x.logsumexp((0, 1), True)).exp(),
    "the logarithm of the sum put in front": lambda x: (x.logsumexp(-1, True) - x).exp(),
    "logarithms of another base": lambda x: x.log_softmax(-1).exp2(),
    "logarithms in 16 bits": lambda x: x.bfloat16().log_softmax(-1).exp().float(),
    "logarithms in more bits": lambda x: x.log_softmax(-1, dtype=torch.float64).exp(),
    "16 bits": lambda x: by_amax(x.bfloat16()).float(),
}


def folded(function: Function) -> tuple[torch.fx.GraphModule, int]:
    module = make_fx(function, SPELT_OUT, tracing_mode="fake", pre_dispatch=True)(SCORES)
    make_functional(module)
    tidy(module)
    return module, fold_softmaxes(module)


@pytest.mark.parametrize("name", WRITTEN)
def test_it_is_the_operator(name: str) -> None:
    module, count = folded(WRITTEN[name])
    assert count == 1 and fold_softmaxes(module) == 0
    operators = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert operators == [aten.softmax.int]
    torch.testing.assert_close(module(SCORES), WRITTEN[name](SCORES))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_almost_so_stays(name: str) -> None:
    module, count = folded(OTHERS[name])
    assert count == 0
    torch.testing.assert_close(module(SCORES), OTHERS[name](SCORES), equal_nan=True)


@pytest.mark.parametrize("name", ["values", "by the logarithm of the sum", "by logarithms"])
def test_an_attention_with_it_is_ragged(name: str) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", query / math.sqrt(HEAD_SIZE), repeated(key))
        weights = WRITTEN[name](scores.masked_fill(~mask, -math.inf))
        return torch.einsum("bhqk,bkhd->bqhd", weights, repeated(value)).flatten(2)

    assert engine_error(Decoder(layers=1, attend=attend), vocabulary=VOCABULARY) < TOLERANCE
