"""A padded call: its padding removed, the flat graph run on the real tokens, the rows put back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from selective_compile.compiling import compiled
from selective_compile.current_device import on
from selective_compile.implementations import forced_implementation
from selective_compile.options import BackendOptions
from selective_compile.padding_reads import Fill, SummaryProgram
from selective_compile.passes import Rewrite
from selective_compile.passes.axes import Axes, Axis
from selective_compile.proved_tensors import ProvedTensors

NEVER = 2**62  # no column but the first is a multiple of it


class RealTokens:
    """Where the real tokens of a ``[B, S]`` batch are.

    Attributes:
        flat: [T] int64, index of each real token in the flattened batch, requests in order.
        columns: [T] int64, its column, which is its position to the model.
        cu_seqlens_q: [B + 1] int32.
        starts: [B] int64, the column of each row's first real token; 0 in a row without any.
        contiguous: every row's real tokens are side by side.
    """

    def __init__(self, mask: Tensor) -> None:
        batch, self.length = mask.shape
        lengths = mask.sum(1)
        self.flat = mask.reshape(-1).nonzero()[:, 0]
        self.columns = self.flat % self.length
        self.cu_seqlens_q = torch.zeros(batch + 1, dtype=torch.int32, device=mask.device)
        self.cu_seqlens_q[1:] = lengths.cumsum(0)
        self.starts = mask.int().argmax(1)
        ends = self.length - mask.flip(1).int().argmax(1)
        self.contiguous = bool(((ends - self.starts == lengths) | (lengths == 0)).all())


class PaddedProgram:
    """Called with Dynamo's graph inputs in Dynamo's order; returns Dynamo's graph outputs.

    Some calls run Dynamo's own graph, uncompiled: a length that the trace does not hold for, a mask of other numbers
    than 0 and 1, a window or a bias by distance over rows with holes, chunks, a prefix or recurrences over rows that
    padding shifts, fewer than two real tokens, other values in the tensors that a proof has read, and a summary of
    whole rows that reads their padding.
    """

    def __init__(self, rewritten: Rewrite, module: fx.GraphModule, options: BackendOptions) -> None:
        flat = rewritten.flat
        assert flat is not None
        self._module, self._options = module, options
        # Places among the arguments and no example tensors: what this keeps must not keep a dropped model's weights.
        self._inputs = [given.index for given in rewritten.traced.tokens()]
        self._weights = [given.index for given in flat.weights]
        self._tokens = [given.index for given in flat.tokens]
        self._uses_positions, self._device, self._sizes = flat.uses_positions, flat.device, flat.sizes
        self._proved = [given.index for given in flat.proved_from]
        proved: list[Any] = [given.example for given in flat.proved_from]
        self._values = ProvedTensors(proved)
        self._conditions = rewritten.traced.conditions
        self._outputs = tuple(zip(flat.outputs, rewritten.tails, strict=True))
        padding = {call.family.padding for call in flat.calls if call.family is not None}
        self._mask = next((given.index for given in rewritten.traced.tokens() if given.node in padding), None)
        families = [call.family for call in flat.calls if call.family is not None]
        self._by_distance = any(family.window or family.slopes or family.distances for family in families)
        # What the first column of a row must be a multiple of.  A recurrence goes over padding as over any token, and
        # padding takes places of a prefix, so that there must be none in front.
        self._aligned = {family.chunk for family in families if family.chunk}
        self._aligned |= {NEVER} if flat.recurrences or flat.prefix else set()
        self._run = compiled(flat, inductor=options.inductor)
        self._summary = None if rewritten.summary is None else SummaryProgram(rewritten.summary)

    def __call__(self, *arguments: Any) -> Any:
        if self._summary is not None and self._summary.given_up:
            return self._as_it_came(*arguments)  # from now on: it is worth compiling
        batch, length = self._batch_shape(arguments)
        symbols = {self._sizes.token: length, self._sizes.batch: batch}
        real = self._real(arguments, batch, length) if self._holds_for(arguments, symbols) else None
        if real is None:
            return self._module(*arguments)
        with on(self._device), forced_implementation(self._options.implementation):
            results = self._run(*self._flat_arguments(arguments, real, batch, length))

        def put_back(place: int, fill: Fill = torch.zero_) -> Any:
            kind, tail = self._outputs[place]
            if not isinstance(kind, Axes):
                return size_value(kind, symbols)
            return tail(padded(results[place], kind, real, batch, length, fill))

        if self._summary is None:
            return tuple(map(put_back, range(len(self._outputs))))
        is_padded = len(real.flat) < batch * length
        found = self._summary(arguments, put_back, len(self._outputs), is_padded=is_padded)
        return self._module(*arguments) if found is None else found

    @cached_property
    def _as_it_came(self) -> Callable[..., Any]:
        return torch.compile(self._module, dynamic=True) if self._options.inductor else self._module

    def _holds_for(self, arguments: tuple[Any, ...], symbols: dict[Any, int]) -> bool:
        """Whether what was proved is of such a call."""
        if self._mask is not None and not zeros_and_ones(arguments[self._mask]):
            return False  # what the masks are for other numbers was not proved
        if not self._values.hold([arguments[index] for index in self._proved]):
            return False
        return all(holds(condition, symbols) for condition in self._conditions)

    def _real(self, arguments: tuple[Any, ...], batch: int, length: int) -> RealTokens | None:
        """The real tokens; None where the model itself has to compute them."""
        if self._mask is None:
            mask = torch.ones(batch, length, dtype=torch.bool, device=self._device)
        else:
            mask = (arguments[self._mask] != 0).expand(batch, length)
        real = RealTokens(mask)
        # T of 0 or 1 would be a graph of its own.
        return real if len(real.flat) > 1 and self._keeps_columns(real) else None

    def _keeps_columns(self, real: RealTokens) -> bool:
        """Whether the model sees its columns as they are without padding, as far as it counts them."""
        if (self._by_distance or self._aligned) and not real.contiguous:
            return False  # a hole in a row shifts what is behind it
        return all(bool((real.starts % multiple == 0).all()) for multiple in self._aligned)

    def _batch_shape(self, arguments: tuple[Any, ...]) -> tuple[int, int]:
        shapes = [arguments[index].shape[:2] for index in self._inputs]
        return max(int(batch) for batch, _ in shapes), int(shapes[0][1])

    def _flat_arguments(self, arguments: tuple[Any, ...], real: RealTokens, batch: int, length: int) -> list[Any]:
        chosen: list[Any] = [arguments[index] for index in self._weights]
        chosen += [gathered(arguments[index], real, batch, length) for index in self._tokens]
        if self._uses_positions:
            chosen.append(real.columns)
        return [*chosen, real.cu_seqlens_q]


def zeros_and_ones(mask: Tensor) -> bool:
    return mask.dtype == torch.bool or bool(((mask == 0) | (mask == 1)).all())


def gathered(value: Tensor, real: RealTokens, batch: int, length: int) -> Tensor:
    """The real tokens of one ``[B, S, ...]`` input (or ``[1, S, ...]``, the same for all) as ``[1, T, ...]``."""
    value = value.expand(batch, length, *value.shape[2:])
    return value.reshape(batch * length, *value.shape[2:])[real.flat][None]


def padded(value: Tensor, axes: Axes, real: RealTokens, batch: int, length: int, fill: Fill = torch.zero_) -> Tensor:
    """An output over ``[1, T]`` put back over ``[B, S]``; what ``fill`` writes where there is no token.

    ``axes`` are those of the output in the ``[B, S]`` graph; a dimension may be batch, tokens, or both merged.
    """
    if axes.is_constant:
        return value
    token = axes.holding(Axis.TOKEN)[0]
    rows = value.movedim(token, 0)
    merged = Axis.BATCH in axes.dims[token]
    full = fill(rows.new_empty(batch * length, *rows.shape[1:])).index_copy_(0, real.flat, rows)
    if merged:
        return full.movedim(0, token)
    full = full.reshape(batch, length, *rows.shape[1:])
    at = axes.holding(Axis.BATCH)
    if not at:
        assert batch == 1, "an output with tokens but no batch dimension in a batch of several requests"
        return full.select(0, 0).movedim(0, token)
    # Without its token dimension, an output still has its batch dimension, of size 1 here, at its place.
    without = full.squeeze(2 + at[0] - (at[0] > token))
    return without.movedim((0, 1), (at[0], token))


def size_value(size: int | sympy.Expr, symbols: dict[Any, int]) -> int:
    return size if isinstance(size, int) else int(size.subs({k: v for k, v in symbols.items() if k is not None}))


def holds(condition: sympy.Basic, symbols: dict[Any, int]) -> bool:
    return bool(condition.subs({k: v for k, v in symbols.items() if k is not None}))
