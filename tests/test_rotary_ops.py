"""The operator that rotates and attends, as PyTorch sees it: schema, fake, and the choice of implementation."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

from selective_compile import implementations, ops, reference
from selective_compile.implementations import forced_implementation
from selective_compile.rotary_ops import rotary_attention
from tests.kernels.ragged_cases import Case, make_inputs
from tests.kernels.rotary_cases import TURNS, Turn, rotary

STEP = Case(name="step", requests=((3, 5), (1, 20), (0, 0)), padding_rows=1)


def finite(case: Case, turn: Turn, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """opcheck compares tensors without equal_nan."""
    arguments = rotary(make_inputs(case, dtype), turn)
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and argument.is_floating_point():
            argument.nan_to_num_()
    return arguments


@pytest.mark.parametrize("turn", (TURNS[0], TURNS[9]), ids=str)
def test_opcheck(turn: Turn) -> None:
    with forced_implementation("reference"):
        opcheck(rotary_attention, finite(STEP, turn))


def test_the_schema_declares_what_is_changed_in_place() -> None:
    arguments = rotary_attention._schema.arguments
    written = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]
    assert written == ["key_pool", "value_pool"]
    others = torch.ops.selective.ragged_attention.default._schema.arguments[3:]
    assert [(each.name, each.type, each.default_value) for each in arguments[12:]] == [
        (each.name, each.type, each.default_value) for each in others
    ]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_native_kernel_attends_to_what_the_reference_rotates(dtype: torch.dtype) -> None:
    if not implementations.native_cpu_available():
        pytest.skip("no C++ compiler")
    ours, theirs = finite(STEP, TURNS[9], dtype), finite(STEP, TURNS[9], dtype)
    with forced_implementation("cpu"):
        found = rotary_attention(*ours)
    near = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, reference.rotary_attention(*theirs), rtol=near, atol=near)
    assert torch.equal(ours[12], theirs[12]) and torch.equal(ours[13], theirs[13])


def test_a_batch_invariant_engine_has_its_keys_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = pytest.importorskip("selective_compile.kernels.ragged_attention_triton")
    seen = []
    monkeypatch.setattr(launcher, "attend", lambda *args, whole, written: seen.append(whole) or args[0])
    for invariant in (False, True):
        ops._kernel.cache_clear()
        with forced_implementation("triton", batch_invariant=invariant):
            rotary_attention(*finite(STEP, TURNS[0]))
    assert seen == [False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({3: (5, 5)}, "cos must be [T, 6] or [T, 3] of a floating dtype"),
        ({4: (5, 3)}, "sin must be [T, 6] as cos, got [T, 3]"),
        ({5: (8,)}, "query_weight must be [16] of a floating dtype"),
        ({6: (1, 16)}, "key_weight must be [16] of a floating dtype"),
    ],
    ids=str,
)
def test_wrong_shapes_are_refused_when_traced(change: dict[int, tuple[int, ...]], message: str) -> None:
    arguments = traced_arguments()
    for place, shape in change.items():
        arguments[place] = torch.empty(shape, device="meta")
    with pytest.raises(ValueError, match=re.escape(message)):
        rotary_attention(*arguments)


@pytest.mark.parametrize(("first", "rotated"), ((0, 5), (12, 6), (-1, 4), (0, 0)))
def test_a_part_that_is_not_in_the_head_is_refused_when_traced(first: int, rotated: int) -> None:
    arguments = traced_arguments()
    arguments[9:11] = first, rotated
    with pytest.raises(ValueError, match=f"an even part of 16 elements, got {first} and {rotated}"):
        rotary_attention(*arguments)


def test_pools_of_another_dtype_are_refused_when_traced() -> None:
    arguments = traced_arguments()
    arguments[12] = torch.empty(4, 2, 8, 20, dtype=torch.int8, device="meta")
    with pytest.raises(
        ValueError, match=re.escape("key_pool must be torch.float32 or torch.float8_e4m3fn, got torch.int8")
    ):
        rotary_attention(*arguments)


def traced_arguments() -> list[Any]:
    rows = [torch.empty(5, heads, 16, device="meta") for heads in (4, 2, 2)]
    tables = [torch.empty(5, 6, device="meta") for _ in range(2)]
    pools = [torch.empty(4, 2, 8, 16, device="meta") for _ in range(2)]
    metadata = [torch.empty(2, dtype=torch.int32, device="meta") for _ in range(4)]
    return [*rows, *tables, None, None, None, 0.0, 0, 6, False, *pools, *metadata, 0.3, 0, 0.0]


def two_layers(first: tuple[Any, ...], key_pool: torch.Tensor, value_pool: torch.Tensor) -> torch.Tensor:
    """The second one rotates what the first one gives, and has pools of its own."""
    query, key, value, *rest = first
    hidden = rotary_attention(query * 2, key + 1, value, *rest)
    return rotary_attention(hidden + 1, key, value * 3, *rest[:9], key_pool, value_pool, *rest[11:]) + hidden


def test_compiled_graph_writes_the_pools_in_place_without_copying_them() -> None:
    """Functionalisation makes the op pure; if Inductor did not undo that, each call would copy the pools."""

    def given() -> tuple[Any, ...]:
        arguments = finite(STEP, TURNS[9])
        return arguments, *(torch.zeros_like(arguments[place]) for place in (12, 13))

    with torch.no_grad(), forced_implementation("reference"):
        theirs, ours = given(), given()
        expected = two_layers(*theirs)
        addresses = [pool.data_ptr() for pool in (*ours[0][12:14], *ours[1:])]
        result, (code,) = run_and_get_code(torch.compile(two_layers, fullgraph=True), *ours)
    torch.testing.assert_close(result, expected)
    assert [pool.data_ptr() for pool in (*ours[0][12:14], *ours[1:])] == addresses
    for pool, other in zip((*ours[0][12:14], *ours[1:]), (*theirs[0][12:14], *theirs[1:]), strict=True):
        torch.testing.assert_close(pool, other)
    assert code.count("torch.ops.selective.rotary_attention.default(") == 2
    assert not re.search(r"\b(clone|copy_)\b", code) and "auto_functionalized" not in code
