"""Mixtures of experts as native calls; and that a request alone reads the experts of its own token and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import selective_compile as sc
from selective_compile.backend import compile_step_program
from selective_compile.call_sequence import CallSequence
from selective_compile.call_values import NotFollowed
from selective_compile.coverage.random_model import random_model
from selective_compile.grouped_ops import group_rows, grouped_linear, take_rows
from selective_compile.kernels import group_rows_cpu, linear_cpu, top_values_cpu
from selective_compile.native_calls import native_calls
from tests.runtime.test_step_graphs import tiny_mixtral
from tests.test_native_calls import calls_of, examples, written

LAUNCHERS = (group_rows_cpu, linear_cpu, top_values_cpu)
pytestmark = pytest.mark.skipif(not all(each.available() for each in LAUNCHERS), reason="needs the native kernels")

MIXTURE = """largest = torch.ops.aten.topk.default(x, 1)
groups = torch.ops.selective.group_rows.default({choices}, {groups}, None)
rows_of = torch.ops.selective.take_rows.default(x, groups[0])
experts = reinterpret_tensor(weight, (8, 1, 8), (8, 8, 1), 0)
buf = torch.ops.selective.grouped_linear.default(rows_of, experts, groups[2])
return (torch.ops.selective.take_rows.default(buf, {back}), )"""


def sequence_of(choices: str = "largest[1]", groups: int = 8, back: str = "groups[1]") -> CallSequence:
    body = MIXTURE.format(choices=choices, groups=groups, back=back)
    return CallSequence(calls_of(body), num_arguments=2, num_weights=0)


def mixture(x: Tensor, weight: Tensor) -> Tensor:
    order, places, ends = group_rows(x.topk(1)[1], 8)
    return take_rows(grouped_linear(take_rows(x, order), weight.view(8, 1, 8), ends), places)


def test_they_give_the_same_at_any_size() -> None:
    sequence = sequence_of()
    assert len(calls_of(MIXTURE.format(choices="largest[1]", groups=8, back="groups[1]")).calls) == 5
    for rows in (2, 5, 700, 3):
        x, weight = torch.randn(rows, 8), torch.randn(8, 8)
        found = sequence([x, weight], ())
        assert torch.equal(found, mixture(x, weight))
        torch.testing.assert_close(found, (x * weight[x.argmax(-1)]).sum(-1, keepdim=True))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("group_rows.default(x, 2, None)[0]", "groups must not be negative"),
        ("take_rows.default(weight, reinterpret_tensor(x, (rows, ), (1, ), 0))", "the index must be among the rows"),
        ("grouped_linear.default(weight, experts, reinterpret_tensor(x, (1, ), (1, ), 0))", "ends must be in order"),
    ],
)
def test_what_kernels_refuse_is_refused_by_name(body: str, message: str) -> None:
    body = f"""experts = reinterpret_tensor(weight, (1, 8, 8), (64, 8, 1), 0)
return (torch.ops.selective.{body}, )"""
    found, weight = examples()
    with found.fake_mode:
        numbers = torch.empty(found.shape[0], 1, dtype=torch.int64)
    sequence = CallSequence(native_calls(written(body), [numbers, weight]), num_arguments=2, num_weights=0)
    sequence([torch.ones(2, 1, dtype=torch.int64), torch.randn(8, 8)], ())
    with pytest.raises(ValueError, match=message):
        sequence([torch.tensor([[-1], [2]]), torch.randn(8, 8)], ())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("torch.ops.aten.topk.default(x, 1, 0)", "along dimension 0"),
        ("torch.ops.aten.topk.default(x, 1, -1, False)", "the largest of"),
        ("torch.ops.aten.topk.default(empty_strided_cpu((2, 2), (2, 1), torch.float16), 1)", "float16"),
        ("torch.ops.selective.take_rows.default(reinterpret_tensor(x, (8, rows), (1, 8), 0), x)", "not contiguous"),
    ],
)
def test_what_is_not_followed(body: str, message: str) -> None:
    with pytest.raises(NotFollowed, match=message):
        calls_of(f"return ({body}, )")


def test_a_request_alone_reads_the_experts_of_its_own_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has two rows at least, of which the second is nobody's here."""
    model: Any = tiny_mixtral()
    read: list[tuple[int, int]] = []
    run = linear_cpu.grouped_linear

    def counted(x: Tensor, weight: Tensor, ends: Tensor, *others: Any, **named: Any) -> Tensor:
        counts = ends.diff(prepend=ends.new_zeros(1))
        read.append((len(x), int((counts > 0).sum())))
        return run(x, weight, ends, *others, **named)

    engine = sc.Engine(model, sc.EngineConfig(compile=False, max_kv_tokens=256))
    monkeypatch.setattr(linear_cpu, "grouped_linear", counted)
    request = engine.submit([3, 1, 4, 1, 5], max_new_tokens=9)
    while engine.step():
        pass
    top = model.config.num_experts_per_tok
    decoding = read[2 * model.config.num_hidden_layers :]
    assert len(decoding) == 2 * model.config.num_hidden_layers * 8 == 32 and model.config.num_local_experts > top
    assert set(decoding) == {(2 * top, top)}
    assert request.tokens == model.generate(torch.tensor([[3, 1, 4, 1, 5]]), max_new_tokens=9)[0, 5:].tolist()


@pytest.mark.parametrize("model_type", ["gpt_oss", "gpt2"])
def test_experts_by_columns_with_biases_beside_sinks_and_layers_by_columns_are_followed(model_type: str) -> None:
    model: Any = random_model(model_type).bfloat16()
    program = compile_step_program(model, sc.EngineConfig(max_kv_tokens=256))
    assert program._run.sequence is not None
    request = sc.Engine(model, program.config, program=program).submit([3, 1, 4, 1, 5], max_new_tokens=6)
    assert (
        list(request.result().tokens)
        == model.generate(torch.tensor([[3, 1, 4, 1, 5]]), max_new_tokens=6)[0, 5:].tolist()
    )
