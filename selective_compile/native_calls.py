"""The native calls that Inductor's code for a step makes, found by running that code on what stands for tensors.

The code is Python: it allocates memory, makes views, and calls C++ kernels that Inductor has built and our operators.
Of a model of 12 layers it makes 110 calls in a step, and the Python around them takes as long as reading 100 MB of
weights does. Run once on `Memory` in place of tensors, it tells which calls it makes, with which addresses and sizes;
`call_sequence` then makes them without it. Code that does anything else is `NotFollowed`, and runs as it is.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import torch

from selective_compile import ops
from selective_compile.call_values import Memory, NotFollowed, Pointer, Size, Storage, same
from selective_compile.int8_rows import row_bytes
from selective_compile.kernels import (
    group_rows_cpu,
    head_products_cpu,
    linear_cpu,
    ragged_attention_cpu,
    top_values_cpu,
)
from selective_compile.kernels.call_sequence_cpu import MOST_ARGUMENTS
from selective_compile.kernels.linear_call import lie_by_columns

THREADS = Size.symbol(0)
Value = int | Size | Pointer
Follow = Callable[[Callable[..., Any], Sequence[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A native function and its arguments; ``packed``: it takes their address, and ``checked``: returns a status."""

    function: int
    arguments: tuple[Value, ...]
    packed: bool = False
    checked: bool = False


@dataclass(frozen=True, kw_only=True)
class NativeCalls:
    """The calls of a step in order.

    Attributes:
        sizes: of symbol 1, 2, …, which argument and which of its dimensions it is; symbol 0 is the number of threads.
        output: what the step returns, in memory of its own.
    """

    calls: tuple[Call, ...]
    sizes: tuple[tuple[int, int], ...]
    output: Memory


def native_calls(call: Callable[..., Any], examples: Sequence[Any]) -> NativeCalls:
    """As `calls_through` one piece of code.

    Args:
        call: a function, or method, of a module that Inductor has made, of a list of arguments.
    """
    return calls_through(lambda follow, arguments: follow(call, arguments), examples)


def calls_through(step: Callable[[Follow, Sequence[Any]], Any], examples: Sequence[Any]) -> NativeCalls:
    """
    Args:
        step: has each piece of code in turn followed on what stands for its arguments; of what stands for its own.
        examples: tensors like its arguments; sizes that may be others are symbolic.

    Raises:
        NotFollowed: it does what is not followed here.
    """
    run = _Run(examples)
    found = step(run.follow, run.arguments)
    if len(found) != 1 or not isinstance(found[0], Memory):
        raise NotFollowed(f"what is returned: {len(found)} values")
    (output,) = found
    whole = same(output.storage.num_bytes, output.numel() * output.dtype.itemsize)
    if not whole or not output.is_contiguous():
        raise NotFollowed("the result is part of something else")
    return NativeCalls(calls=tuple(run.calls), sizes=tuple(run.sizes), output=output)


class _Run:
    def __init__(self, examples: Sequence[Any]) -> None:
        self.calls: list[Call] = []
        self.sizes: list[tuple[int, int]] = []
        self._symbols: dict[str, Size] = {}
        self.arguments = [self._argument(place, example) for place, example in enumerate(examples)]

    def follow(self, call: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        code: Any = getattr(call, "__func__", call)
        names = {name: self.replaced(name, value) for name, value in code.__globals__.items()}
        function = FunctionType(code.__code__, names | {"__builtins__": {}})
        return function(None, [*arguments]) if code is not call else function([*arguments])

    def _argument(self, place: int, example: Any) -> Memory:
        if not isinstance(example, torch.Tensor) or example.device.type != "cpu":
            raise NotFollowed(f"an argument that is no tensor on a CPU: {type(example).__name__}")
        sizes: Sequence[Any] = example.shape
        shape = [self._symbol(size, place, dim) for dim, size in enumerate(sizes)]
        strides: list[int | Size] = []
        for dim, stride in enumerate(example.stride()):
            later: int | Size = 1
            for size in shape[dim + 1 :]:
                later = later * size
            # Of what is contiguous, as all that changes its size is; `CompiledStep` looks.
            strides.append(stride if type(stride) is int else later)
        return Memory(Storage(argument=place), example.dtype, shape, strides)

    def _symbol(self, size: Any, place: int, dim: int) -> int | Size:
        """The same for sizes that are the same in every step."""
        if type(size) is int:
            return size
        found = self._symbols.get(str(size.node.expr))
        if found is None:
            self.sizes.append((place, dim))
            found = self._symbols[str(size.node.expr)] = Size.symbol(len(self.sizes))
        return found

    def replaced(self, name: str, value: Any) -> Any:
        """What a name of the module stands for in this run."""
        ours: Mapping[str, Any] = {
            "torch": self._torch(),
            "empty_strided_cpu": Memory.empty,
            "reinterpret_tensor": lambda memory, shape, strides, offset: memory.view(shape, strides, offset),
        }
        if name in ours:
            return ours[name]
        if name.startswith("assert_"):  # of sizes, strides, alignment or more, as releases of torch have them
            return _pass
        if isinstance(value, BuiltinFunctionType) and name.startswith("cpp_fused"):
            return functools.partial(self._generated, value)
        return value if isinstance(value, (int, float)) else _Only(name)

    def _generated(self, kernel: BuiltinFunctionType, *arguments: Any) -> None:
        values = [each.data_ptr() if isinstance(each, Memory) else each for each in arguments]
        if len(values) > MOST_ARGUMENTS or not all(isinstance(value, (int, Size, Pointer)) for value in values):
            raise NotFollowed(f"{len(values)} arguments of a kernel, or one that is no address and no integer")
        self.calls.append(Call(function=_address(kernel), arguments=tuple(values)))

    def _torch(self) -> _Torch:
        own = {"linear": self._linear, "linears": self._linears, "linears_int8": self._linears_int8}
        own |= {"ragged_attention": self._ragged_attention, "latent_attention": self._latent_attention}
        own |= {"head_products": self._head_products, "grouped_linear": self._grouped_linear}
        own |= {"group_rows": self._group_rows, "take_rows": self._take_rows}
        named: dict[str, dict[str, Any]] = {"selective": own, "aten": {"topk": self._topk}}
        return _Torch("torch", ops=_Only("torch.ops", **{name: _overloads(name, runs) for name, runs in named.items()}))

    def _linear(self, x: Memory, weight: Memory, bias: Memory | None = None) -> Memory:
        return self._linears(x, [weight], [bias])[0]

    def _linears(self, x: Memory, weights: Sequence[Memory], biases: Sequence[Memory | None]) -> list[Memory]:
        return self._products(x, weights, [None] * len(weights), biases)

    def _linears_int8(
        self, x: Memory, weights: Sequence[Memory], scales: Sequence[Memory], biases: Sequence[Memory | None]
    ) -> list[Memory]:
        return self._products(x, weights, scales, biases)

    def _products(
        self,
        x: Memory,
        weights: Sequence[Memory],
        scales: Sequence[Memory | None],
        biases: Sequence[Memory | None],
    ) -> list[Memory]:
        if x.dtype not in linear_cpu.DTYPES or not x.shape[-1]:
            raise NotFollowed(f"linear layers of {x.dtype}, {x.shape[-1]} deep")
        by_columns = all(scale is None for scale in scales) and lie_by_columns(weights)
        for each in (x, *(() if by_columns else weights), *scales, *biases):
            if each is not None:
                each.contiguous()
        outputs = [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]
        fields = linear_cpu.call_fields(x, weights, scales, biases, outputs, THREADS)
        self._pack(linear_cpu.address_of("selective_linear"), fields)
        return outputs

    def _ragged_attention(self, query: Memory, *arguments: Any, **named: Any) -> Memory:
        given = dict(zip(_names_of(ops.ragged_attention), (query, *arguments), strict=False)) | named
        found = {name: given.pop(name) for name in _TENSORS}
        limits = (given.pop("window"), given.pop("chunk", 0), given.pop("prefix", 0))
        scale, softcap = float(given.pop("scale")), float(given.pop("softcap"))
        per_head = [given.pop(name, None) for name in ("sinks", "slopes")]
        distance_bias = given.pop("distance_bias", None)
        if others := [name for name, value in given.items() if value is not None]:
            raise NotFollowed(f"attention with {', '.join(others)}")
        if any(each is not None and each.dtype is not torch.float32 for each in (*per_head, distance_bias)):
            raise NotFollowed("sinks, slopes or biases by distance that are not float32")
        addresses = (0 if each is None else each.contiguous().data_ptr() for each in per_head)
        output = query.new_empty((*query.shape[:2], found["value"].shape[2]))
        if distance_bias is not None:
            distance_bias.contiguous()
        by_row = ragged_attention_cpu.fields_by_row(distance_bias, per_head[0])
        score = (*limits, *addresses, *by_row, scale, softcap)
        fields = ragged_attention_cpu.call_fields(output, **found, score=score, threads=THREADS)
        self._pack(ragged_attention_cpu.address_of("selective_attention"), fields, checked=True)
        return output

    def _latent_attention(self, query: Memory, key: Memory, pool: Memory, *arguments: Any, **named: Any) -> Memory:
        *metadata, value_size = arguments[:5]
        stored = row_bytes(value_size) if pool.dtype is torch.int8 else value_size
        parts = [each.view((*each.shape[:-1], n), each.strides, 0) for each, n in ((key, value_size), (pool, stored))]
        return self._ragged_attention(query, key, parts[0], pool, parts[1], *metadata, *arguments[5:], **named)

    def _head_products(self, x: Memory, weight: Memory, transposed: bool) -> Memory:
        taken = x.dtype in head_products_cpu.DTYPES and same(x.strides[2], 1) and same(weight.strides[2], 1)
        if not taken or not head_products_cpu.available():
            raise NotFollowed(f"products of heads of {x.dtype} by a library")
        output = x.new_empty((*x.shape[:2], weight.shape[2 if transposed else 1]))
        fields = head_products_cpu.call_fields(output, x, weight, transposed, THREADS)
        self._pack(head_products_cpu.address_of("selective_head_products"), fields, checked=True)
        return output

    def _grouped_linear(
        self, x: Memory, weight: Memory, ends: Memory, scales: Memory | None = None, batch_invariant: bool = False
    ) -> Memory:
        if x.dtype not in linear_cpu.DTYPES:
            raise NotFollowed(f"linear layers on groups of {x.dtype}")
        for each in (x, ends, scales):
            if each is not None:
                each.contiguous()
        if not (scales is None and lie_by_columns([weight])):
            weight.contiguous()
        output = x.new_empty((x.shape[0], weight.shape[1]))
        fields = linear_cpu.grouped_fields(x, weight, scales, ends, output, batch_invariant, THREADS)
        self._pack(linear_cpu.address_of("selective_grouped_linear"), fields, checked=True)
        return output

    def _group_rows(
        self, choice: Memory, groups: int, cu_seqlens_q: Memory | None = None
    ) -> tuple[Memory, Memory, Memory]:
        if not group_rows_cpu.available():
            raise NotFollowed("rows in the order of their groups, by the reference")
        order, places = (choice.contiguous().new_empty((choice.numel(),)) for _ in range(2))
        ends = choice.new_empty((groups,), torch.int32)
        if cu_seqlens_q is not None:
            cu_seqlens_q.contiguous()
        fields = group_rows_cpu.call_fields(choice, groups, cu_seqlens_q, order, places, ends)
        self._pack(group_rows_cpu.address_of("selective_group_rows"), fields, checked=True)
        return order, places, ends

    def _take_rows(self, x: Memory, index: Memory) -> Memory:
        output = x.contiguous().new_empty((index.contiguous().shape[0], x.shape[1]))
        fields = group_rows_cpu.take_fields(x, index, output, THREADS)
        self._pack(group_rows_cpu.address_of("selective_take_rows"), fields, checked=True)
        return output

    def _topk(
        self, x: Memory, k: int, dim: int = -1, largest: bool = True, is_sorted: bool = True
    ) -> tuple[Memory, ...]:
        of_rows = len(x.shape) >= 2 and dim in (-1, len(x.shape) - 1) and largest
        if not of_rows or x.dtype not in top_values_cpu.DTYPES or not top_values_cpu.chooses_as_torch():
            raise NotFollowed(f"the largest of {x.dtype} along dimension {dim}")
        values, places = (x.contiguous().new_empty((*x.shape[:-1], k), dtype) for dtype in (x.dtype, torch.int64))
        fields = top_values_cpu.call_fields(x, k, values, places, THREADS)
        self._pack(top_values_cpu.address_of("selective_top_values"), fields)
        return values, places

    def _pack(self, function: int, fields: Sequence[Any], *, checked: bool = False) -> None:
        if len(fields) > MOST_ARGUMENTS:
            raise NotFollowed(f"{len(fields)} arguments of a call")
        values = tuple(_bits(each) if isinstance(each, float) else each for each in fields)
        self.calls.append(Call(function=function, arguments=values, packed=True, checked=checked))


# What `ragged_attention_cpu.call_fields` takes.
_TENSORS = (
    *("query", "key", "value", "key_pool", "value_pool"),
    *("cu_seqlens_q", "context_lens", "block_table", "slot_mapping"),
)


def _overloads(namespace: str, runs: Mapping[str, Callable[..., Any]]) -> _Only:
    """What stands for the operators of a namespace, of which these are followed."""
    return _Only(f"torch.ops.{namespace}", **{name: SimpleNamespace(default=run) for name, run in runs.items()})


@functools.cache
def _names_of(operator: torch._ops.OpOverload) -> tuple[str, ...]:
    """Of its arguments, all of which generated code gives, those that have a default by their names."""
    return tuple(each.name for each in operator._schema.arguments)


class _Only:
    """Has these names, and whatever else is asked of it is not followed."""

    def __init__(self, path: str, **names: Any) -> None:
        self._path = path
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        raise NotFollowed(f"{self._path}.{name}")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        raise NotFollowed(f"a call of {self._path}")


class _Torch(_Only):
    """What generated code takes of the name `torch`: our operators, and dtypes."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name, None)
        return found if isinstance(found, torch.dtype) else super().__getattr__(name)


def _bits(number: float) -> int:
    found: int = struct.unpack("=q", struct.pack("=d", number))[0]
    return found


def _pass(*arguments: Any, **named: Any) -> None:
    """Checks of sizes and strides, which those of every step's inputs are held to elsewhere."""


def _address(kernel: BuiltinFunctionType) -> int:
    """Of the C function that a function of an extension module of Inductor's calls with its arguments."""
    path = getattr(kernel.__self__, "__file__", None)
    if path is None:
        raise NotFollowed(f"{kernel.__name__} is of no file")
    try:
        return ctypes.cast(ctypes.CDLL(path).kernel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError) as error:
        raise NotFollowed(f"{path} has no function `kernel`: {error}") from error
