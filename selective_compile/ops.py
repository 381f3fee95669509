"""The custom operators: schemas, fakes, and the choice of implementation for a device.

    selective::ragged_attention   write this step's keys and values into a paged KV pool, then attend
    selective::varlen_attention   the same without a pool: a request's context is its own rows
    selective::linear             torch.nn.functional.linear, by kernels of ours: on a CPU one that reads a weight
                                  where it lies, on a GPU one whose rows do not depend on their number
    selective::linears            the same for several weights and one x, in one call

`selective_compile.reference` says what they compute. Both are for inference: they have no derivative, and
refuse to run on tensors that require grad while gradients are recorded.

They are registered through `torch.library.Library` and not `torch.library.custom_op`, whose Python wrapper
costs several microseconds a call; a step of a 32-layer model makes 32 calls.

Shapes and dtypes (T rows, N requests, H query heads, K key/value heads, D and Dv key and value head sizes;
the last dimension of every tensor is contiguous):

    query         [T, H, D] float32, bfloat16 or float16
    key, value    [T, K, D], [T, K, Dv]; query head h reads key/value head h // (H // K)
    key_pool      [num_blocks, K, block_size, D], changed in place; value_pool likewise with Dv; query's dtype, or both
                  int8 with the rows of `selective_compile.int8_rows`, row_bytes(D) and row_bytes(Dv) long, but not for
                  Triton's kernels, or both float8_e4m3fn with a scale for each head (`selective_compile.fp8_rows`),
                  but not for the native CPU kernels, in whose place the reference runs. A row of this step is attended
                  to as it stands in the pool
    cu_seqlens_q  [N + 1] int32, rows of request n are cu_seqlens_q[n] : cu_seqlens_q[n + 1], possibly none
    context_lens  [N] int32, tokens of the request in the pool after this step's write
    block_table   [N, max_blocks] int32, block i of request n holds its tokens from i * block_size
    slot_mapping  [T] int64, block * block_size + offset of the row's key and value, or -1: write nothing
    scale         multiplies query . key; softcap > 0 then makes the score softcap * tanh(score / softcap)
    window        > 0: a row at position p sees the positions j with p - window < j <= p; 0: all j <= p
    chunk         > 0: of these, only the positions j with j // chunk == p // chunk; 0: all of them
    sinks         [H] of a floating dtype, or None: a logit per query head that takes part in the softmax as one
                  more key whose value is 0; neither scaled nor softcapped. [T, H]: one of each row's own, with no
                  selection only
    slopes        [H] float32, or None: slopes[h] * (j - p) is added to the score after scale and softcap (ALiBi)
    selection     [T, count] int32, or None: a row sees only these positions of its request, up to its own; each at
                  most once, and -1 behind them. With window 0 and chunk 0 only (`selective_compile.selection_ops`)
    key_scales    [K] float32, above 0, with pools of float8_e4m3fn, else None; value_scales likewise
    prefix        > 0: a row also sees the positions j < prefix that are behind it, as far as its request has them in
                  this step: j < context_lens[n]. With window 0, chunk 0 and no selection only
    distance_bias [T, H, R] of a floating dtype, or [1, H, R] for all rows, or None: what it has for a row and head at
                  min(p - j, R - 1) is added to the score after scale and softcap. With prefix 0 and no selection only
    result        [T, H, Dv], query's dtype; rows past cu_seqlens_q[N] are 0

and of linear: x [..., K], weight [N, K], bias [N] or None, result [..., N], all of x's dtype; linears takes lists of
weights and biases, and returns the list of their results.

Blocks wholly in front of the first position that a request's first row sees (by its window and chunk) are not read
either: they may have been freed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from selective_compile import fp8_rows, reference
from selective_compile.int8_rows import row_bytes

Implementation = Literal["auto", "reference", "cpu", "triton"]
IMPLEMENTATIONS = get_args(Implementation)

_logger = logging.getLogger(__name__)
# The name, and whether for a batch-invariant engine.
_forced: ContextVar[tuple[Implementation, bool]] = ContextVar("selective_implementation", default=("auto", False))


class forced_implementation:
    """Run the ops called inside with the implementation `name`; "auto" lets the device decide again.

    Holds for the current thread (or asyncio task) only: a thread started inside enters it for itself. The
    choice is made when an op runs, not when it is traced, so that one compiled graph serves every
    implementation. "triton" on CPU tensors runs in Triton's interpreter, which is for tests.

    batch_invariant: attention runs as a batch-invariant engine has it, with a request for each row: the result of a
        row is then the same bits whatever the others are. The other implementations give them so by themselves, or
        not at all (`runtime.invariance`).

    Raises:
        ValueError: the name is not one of `Implementation`.
    """

    def __init__(self, name: Implementation, *, batch_invariant: bool = False) -> None:
        if name not in IMPLEMENTATIONS:
            raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
        self._forced = (name, batch_invariant)

    def __enter__(self) -> None:
        self._token = _forced.set(self._forced)

    def __exit__(self, *_: object) -> None:
        _forced.reset(self._token)


def implementation_on(device_type: str) -> str:
    """The name of the implementation that an op called here and now on "cpu" or "cuda" tensors would run.

    Raises:
        ValueError: the forced implementation does not run on this device, or no implementation does.
        RuntimeError: the native CPU kernel was forced and cannot be built.
    """
    return _resolve(_forced.get()[0], device_type)


@functools.cache
def _resolve(name: Implementation, device_type: str) -> str:
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"the tensors' device must be cpu or cuda, got {device_type}")
    if device_type == "cuda":
        if name == "cpu":
            raise ValueError("implementation must be auto, reference or triton on cuda tensors, got 'cpu'")
        return "triton" if name == "auto" else name
    if name in ("reference", "triton") or _native_cpu_available():
        return "cpu" if name == "auto" else name
    if name == "cpu":
        raise RuntimeError("the native CPU kernels cannot be built here; the log has the compiler's message")
    _logger.warning("no native CPU kernel can be built here: attention runs in the slow eager reference")
    return "reference"


def _native_cpu_available() -> bool:
    from selective_compile.kernels import ragged_attention_cpu

    return ragged_attention_cpu.available()


@functools.cache
def _kernel(op: str, name: Implementation, batch_invariant: bool, device_type: str) -> Callable[..., Any]:
    resolved = _resolve(name, device_type)
    linear = {"linear": _linear, "linears": _linears}.get(op)
    kernel = linear(name, resolved) if linear else getattr(_module(resolved), op)
    if batch_invariant and resolved == "triton" and op in ("ragged_attention", "rotary_attention"):
        return functools.partial(kernel, batch_invariant=True)
    return kernel


def attention_kernel(op: str, device_type: str) -> Callable[..., Tensor]:
    """What runs the attention `op` here and now on "cpu" or "cuda" tensors; raises as `implementation_on`."""
    return _kernel(op, *_forced.get(), device_type)


def _linear(name: Implementation, resolved: str) -> Callable[..., Tensor]:
    if name == "reference":
        return reference.linear
    if resolved == "triton":
        from selective_compile.kernels import linear_triton

        return linear_triton.linear
    if resolved == "cpu":
        from selective_compile.kernels import linear_cpu

        if linear_cpu.available():
            return linear_cpu.linear
    return F.linear


def _linears(name: Implementation, resolved: str) -> Callable[..., list[Tensor]]:
    from selective_compile.kernels import linear_cpu

    one = _linear(name, resolved)
    return linear_cpu.linears if one is linear_cpu.linear else functools.partial(_each, one)


def _each(linear: Callable[..., Tensor], x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    return [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _module(resolved: str) -> ModuleType:
    # Imported when first wanted: a machine without a GPU may lack Triton, and one with it a C++ compiler.
    if resolved == "cpu":
        from selective_compile.kernels import ragged_attention_cpu

        return ragged_attention_cpu
    if resolved == "triton":
        from selective_compile.kernels import ragged_attention_triton

        return ragged_attention_triton
    return reference


def _run_ragged_attention(query: Tensor, *args: Any) -> Tensor:
    refuse_gradients(query, *args)
    if reference_stands_in(args[2]):
        return reference.ragged_attention(query, *args)
    return _kernel("ragged_attention", *_forced.get(), query.device.type)(query, *args)


def reference_stands_in(pool: Tensor) -> bool:
    """Whether no kernel but an interpreted one reads such a pool on its device."""
    return pool.dtype is fp8_rows.DTYPE and pool.device.type == "cpu" and _forced.get()[0] != "triton"


def _run_varlen_attention(query: Tensor, *args: Any) -> Tensor:
    refuse_gradients(query, *args)
    return _kernel("varlen_attention", *_forced.get(), query.device.type)(query, *args)


def _run_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    refuse_gradients(x, weight, bias)
    return _kernel("linear", *_forced.get(), x.device.type)(x, weight, bias)


def _run_linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    refuse_gradients(x, *weights, *biases)
    return _kernel("linears", *_forced.get(), x.device.type)(x, weights, biases)


def refuse_gradients(*args: Any) -> None:
    """Raise RuntimeError if a tensor among `args` requires grad while gradients are recorded."""
    # Autograd would differentiate through the reference but not through a kernel: a gradient must not depend
    # on which of them ran.
    if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        raise RuntimeError("the selective ops have no derivative: call them under torch.no_grad()")


def fake_ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    scale: float,
    window: int,
    softcap: float,
    chunk: int = 0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    selection: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    prefix: int = 0,
    distance_bias: Tensor | None = None,
) -> Tensor:
    check_rows(query, key, value)
    check_per_head(query, sinks, slopes)
    check_selection(query, selection, window, chunk, sinks)
    check_prefix(prefix, window, chunk, selection)
    check_distance_bias(query, distance_bias, prefix, selection)
    check_scales(key_pool, key_scales=key_scales, value_scales=value_scales)
    for name, pool, rows in (("key_pool", key_pool, key), ("value_pool", value_pool, value)):
        stored = key_pool.dtype if key_pool.dtype in (torch.int8, fp8_rows.DTYPE) else query.dtype
        size = row_bytes(rows.shape[2]) if stored == torch.int8 else rows.shape[2]
        fits = pool.dim() == 4 and pool.shape[1] == rows.shape[1] and pool.shape[3] == size
        require(fits, f"{name} must be [num_blocks, K, block_size, {size}], got {list(pool.shape)}")
        require(pool.dtype == stored, f"{name} must be {stored}, got {pool.dtype}")
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


def _fake_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    window: int,
    softcap: float,
    chunk: int = 0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    selection: Tensor | None = None,
    prefix: int = 0,
    distance_bias: Tensor | None = None,
) -> Tensor:
    check_rows(query, key, value)
    check_per_head(query, sinks, slopes)
    check_selection(query, selection, window, chunk, sinks)
    check_prefix(prefix, window, chunk, selection)
    check_distance_bias(query, distance_bias, prefix, selection)
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


def check_rows(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require(tensor.dim() == 3, f"{name} must be [T, heads, size], got {list(tensor.shape)}")
        require(tensor.dtype == query.dtype, f"{name} must be {query.dtype}, got {tensor.dtype}")
        torch._check(tensor.shape[0] == query.shape[0])
    heads, kv_heads = query.shape[1], key.shape[1]
    require(query.shape[2] == key.shape[2], f"key must have head size {query.shape[2]}, got {key.shape[2]}")
    require(kv_heads == value.shape[1], f"value must have {kv_heads} heads, got {value.shape[1]}")
    require(heads % kv_heads == 0, f"query must have a multiple of {kv_heads} heads, got {heads}")


def check_per_head(query: Tensor, sinks: Tensor | None, slopes: Tensor | None) -> None:
    heads = query.shape[1]
    if slopes is not None:
        require(slopes.shape == (heads,), f"slopes must be [{heads}], got {list(slopes.shape)}")
    if sinks is not None:
        fits = sinks.dim() in (1, 2) and sinks.shape[-1] == heads
        require(fits, f"sinks must be [{heads}] or [T, {heads}], got {list(sinks.shape)}")
        if sinks.dim() == 2:
            torch._check(sinks.shape[0] == query.shape[0])
        require(sinks.is_floating_point(), f"sinks must be of a floating dtype, got {sinks.dtype}")
    if slopes is not None:
        require(slopes.dtype == torch.float32, f"slopes must be torch.float32, got {slopes.dtype}")


def check_scales(key_pool: Tensor, **given: Tensor | None) -> None:
    for name, scales in given.items():
        if key_pool.dtype != fp8_rows.DTYPE:
            require(scales is None, f"{name} must be None with pools of {key_pool.dtype}")
        elif scales is None or scales.shape != (key_pool.shape[1],) or scales.dtype != torch.float32:
            found = None if scales is None else f"{list(scales.shape)} {scales.dtype}"
            raise ValueError(f"{name} must be [{key_pool.shape[1]}] torch.float32, got {found}")


def check_selection(
    query: Tensor, selection: Tensor | None, window: int, chunk: int, sinks: Tensor | None = None
) -> None:
    if selection is None:
        return
    fits = selection.dim() == 2 and selection.dtype == torch.int32
    require(fits, f"selection must be [T, count] torch.int32, got {list(selection.shape)} {selection.dtype}")
    torch._check(selection.shape[0] == query.shape[0])
    require(not window and not chunk, f"window and chunk must be 0 with a selection, got {window} and {chunk}")
    require(sinks is None or sinks.dim() == 1, "sinks must be the same for all rows with a selection")


def check_prefix(prefix: int, window: int, chunk: int, selection: Tensor | None) -> None:
    """No kernel has the keys of a prefix beside those of a window or a chunk, or of a selection."""
    if not prefix:
        return
    require(prefix > 0, f"prefix must be at least 0, got {prefix}")
    require(selection is None, f"selection must be None with a prefix, got one beside a prefix of {prefix}")
    require(not window and not chunk, f"window and chunk must be 0 with a prefix, got {window} and {chunk}")


def check_distance_bias(query: Tensor, bias: Tensor | None, prefix: int, selection: Tensor | None) -> None:
    """Of keys of a prefix that are behind a row no distance is told, and no kernel has a bias beside a selection."""
    if bias is None:
        return
    heads = query.shape[1]
    fits = bias.dim() == 3 and bias.shape[1] == heads and bias.shape[2] > 0 and bias.is_floating_point()
    found = f"{list(bias.shape)} {bias.dtype}"
    require(fits, f"distance_bias must be [T, {heads}, R] or [1, {heads}, R] of a floating dtype, got {found}")
    if not (isinstance(bias.shape[0], int) and bias.shape[0] == 1):
        torch._check(bias.shape[0] == query.shape[0])
    require(not prefix, f"prefix must be 0 with a distance_bias, got {prefix}")
    require(selection is None, "selection must be None with a distance_bias")


def _fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    require(weight.dim() == 2, f"weight must be [N, K], got {list(weight.shape)}")
    torch._check(x.shape[-1] == weight.shape[1])
    require(weight.dtype == x.dtype, f"weight must be {x.dtype}, got {weight.dtype}")
    if bias is not None:
        require(bias.dtype == x.dtype, f"bias must be {x.dtype}, got {bias.dtype}")
        torch._check(bias.shape[0] == weight.shape[0])
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    require(len(weights) == len(biases), f"biases must be {len(weights)}, got {len(biases)}")
    return [_fake_linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless the condition holds."""
    if not condition:
        raise ValueError(message)


_library = torch.library.Library("selective", "DEF")


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> torch._ops.OpOverload:
    """Define `selective::<schema>`, run by `run` on CPU and CUDA tensors and by `fake` when traced."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"selective::{name}", fake, lib=_library)
    return getattr(torch.ops.selective, name).default


ragged_attention = register(
    "ragged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_pool, Tensor(b!) value_pool, "
    "Tensor cu_seqlens_q, Tensor context_lens, Tensor block_table, Tensor slot_mapping, "
    "float scale, int window, float softcap, int chunk=0, Tensor? sinks=None, Tensor? slopes=None, "
    "Tensor? selection=None, Tensor? key_scales=None, Tensor? value_scales=None, int prefix=0, "
    "Tensor? distance_bias=None) -> Tensor",
    _run_ragged_attention,
    fake_ragged_attention,
)
varlen_attention = register(
    "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, "
    "float scale, int window, float softcap, int chunk=0, Tensor? sinks=None, Tensor? slopes=None, "
    "Tensor? selection=None, int prefix=0, Tensor? distance_bias=None) -> Tensor",
    _run_varlen_attention,
    _fake_varlen_attention,
)
linear = register("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", _run_linear, _fake_linear)
linears = register("linears(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]", _run_linears, _fake_linears)
