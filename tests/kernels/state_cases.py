"""Steps for the tests of the ops with a state: a `StateCase` has an op and sizes, `make_call` draws its arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from selective_compile import state_reference

MIXED = ((1, 30), (23, 9), (0, 12), (1, 0), (40, 0), (0, 0), (2, 64))
DECODE = ((1, 7), (1, 1), (1, 0), (1, 500), (1, 3))


@dataclass(frozen=True, kw_only=True)
class StateCase:
    """One step of one op: `requests` are (rows in this step, tokens before it), `sizes` what the op's SIZES name."""

    op: str
    name: str
    sizes: tuple[int, ...]
    requests: tuple[tuple[int, int], ...] = MIXED
    padding_rows: int = 3
    optional: bool = True  # bias or D are given
    wide: bool = True  # gates and parameters are float32 whatever the rows are
    strided: bool = False
    silu: bool = True

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of an op by name, in the schema's order."""

    op: str
    arguments: dict[str, Any]

    def positional(self) -> tuple[Any, ...]:
        return tuple(self.arguments.values())

    @property
    def pool(self) -> Tensor:
        return self.arguments["state_pool"]

    def replaced(self, **changes: Any) -> Call:
        return dataclasses.replace(self, arguments=self.arguments | changes)

    def fresh(self) -> Call:
        """All requests fresh, and nothing kept."""
        return self.replaced(state_pool=None, context_lens=None, state_slots=None)

    def varlen(self) -> tuple[Any, ...]:
        """The arguments of the op's varlen variant."""
        without = ("state_pool", "context_lens", "state_slots")
        return tuple(value for name, value in self.arguments.items() if name not in without)

    def to(self, dtype: torch.dtype) -> Call:
        """A copy in another dtype, with a pool of its own."""
        floating = {
            name: value.to(dtype, copy=True)
            for name, value in self.arguments.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        return self.replaced(**floating)

    def run(self, module: Any) -> Tensor:
        """By the function of a module that has the op's name."""
        return getattr(module, self.op)(*self.positional())


Draw = Callable[..., Tensor]


def _conv(draw: Draw, rows: Draw, case: StateCase) -> dict[str, Any]:
    channels, width = case.sizes
    return {"x": rows(channels), "weight": draw(channels, width), "bias": draw(channels) if case.optional else None}


def _scan(draw: Draw, rows: Draw, case: StateCase) -> dict[str, Any]:
    channels, groups, size = case.sizes
    shared = (groups, size) if groups else (size,)
    return {
        "x": rows(channels),
        "dt": rows(channels, wide=True).abs(),
        "A": -draw(channels, size).exp(),
        "B": rows(*shared),
        "C": rows(*shared),
        "D": draw(channels) if case.optional else None,
    }


def _ssd(draw: Draw, rows: Draw, case: StateCase) -> dict[str, Any]:
    heads, groups, head_size, size = case.sizes
    return {
        "x": rows(heads, head_size),
        "dt": rows(heads, wide=True).abs(),
        "A": -draw(heads).exp(),
        "B": rows(groups, size),
        "C": rows(groups, size) * size**-0.5,
        "D": draw(heads) if case.optional else None,
    }


def _delta(draw: Draw, rows: Draw, case: StateCase) -> dict[str, Any]:
    key_heads, heads, key_size, value_size, per_channel = case.sizes
    return {
        "query": rows(key_heads, key_size),
        # As the models do: a key longer than 1 makes the state grow without bound.
        "key": torch.nn.functional.normalize(rows(key_heads, key_size), dim=-1),
        "value": rows(heads, value_size),
        "decay": -rows(heads, *(key_size,) * per_channel, wide=True).abs(),
        "beta": rows(heads, wide=True).sigmoid(),
        "scale": 0.3,
    }


def _linear(draw: Draw, rows: Draw, case: StateCase) -> dict[str, Any]:
    return {"decay": rows(*case.sizes, wide=True).sigmoid(), "update": rows(*case.sizes)}


def _wkv(draw: Draw, rows: Draw, case: StateCase) -> dict[str, Any]:
    (channels,) = case.sizes
    parameters = {"time_decay": -draw(channels).exp(), "time_first": draw(channels)}
    return parameters | {"key": rows(channels), "value": rows(channels)}


def _mlstm(draw: Draw, rows: Draw, case: StateCase) -> dict[str, Any]:
    heads, key_size, value_size = case.sizes
    return {
        "query": rows(heads, key_size),
        "key": rows(heads, key_size),
        "value": rows(heads, value_size),
        "input_gate": rows(heads, wide=True),
        "decay": torch.nn.functional.logsigmoid(rows(heads, wide=True)),
        "scale": key_size**-0.5,
        "eps": 1e-6,
    }


# What draws the arguments in front of the pool; the shape of a slot.
OPS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[..., tuple[int, ...]]]] = {
    "causal_conv1d": (_conv, lambda channels, width: (channels, width - 1)),
    "selective_scan": (_scan, lambda channels, groups, size: (channels, size)),
    "ssd": (_ssd, lambda heads, groups, head_size, size: (heads, head_size, size)),
    "gated_delta_rule": (_delta, lambda key_heads, heads, key_size, value_size, _: (heads, key_size, value_size)),
    "linear_recurrence": (_linear, lambda channels: (channels,)),
    "wkv": (_wkv, lambda channels: (channels, 3)),
    "mlstm": (_mlstm, lambda heads, key_size, value_size: (heads, key_size + 1, value_size + 1)),
}
# Sizes: small and odd ones, and those of models.
SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    "causal_conv1d": ((7, 4), (64, 3), (33, 2), (5, 1), (130, 9)),
    "selective_scan": ((7, 0, 5), (64, 0, 16), (34, 2, 16), (33, 3, 8), (1, 0, 1), (20, 0, 40)),
    "ssd": ((3, 1, 5, 7), (4, 2, 64, 128), (6, 3, 33, 17), (2, 2, 1, 1), (4, 1, 24, 16)),
    "gated_delta_rule": (
        (2, 4, 5, 7, 0),
        (1, 2, 128, 128, 0),
        (3, 3, 33, 17, 1),
        (2, 2, 64, 96, 1),
        (1, 1, 1, 1, 0),
        (1, 3, 16, 70, 0),
    ),
    "linear_recurrence": ((7,), (64,), (33,), (150,)),
    "wkv": ((7,), (64,), (33,), (150,)),
    "mlstm": ((2, 5, 7), (2, 64, 128), (3, 17, 70), (1, 1, 1)),
}


def _cases(op: str) -> list[StateCase]:
    sizes = SIZES[op]
    cases = [StateCase(op=op, name="_".join(map(str, each)), sizes=each) for each in sizes]
    first = StateCase(op=op, name="decode", sizes=sizes[1], requests=DECODE, padding_rows=1)
    cases += [first, dataclasses.replace(first, name="strided", requests=MIXED, strided=True)]
    cases += [dataclasses.replace(first, name="plain", sizes=sizes[0], optional=False, wide=False, silu=False)]
    empty = dataclasses.replace(first, padding_rows=2)
    cases += [dataclasses.replace(empty, name="only_padding", requests=((0, 0), (0, 9)))]
    cases += [dataclasses.replace(empty, name="no_request", requests=())]
    return cases


CASES = tuple(case for op in OPS for case in _cases(op))


def any_case(op: str) -> st.SearchStrategy[StateCase]:
    """Steps of any requests and the op's sizes."""
    flags = {name: st.booleans() for name in ("optional", "wide", "strided", "silu")}
    return st.builds(
        functools.partial(StateCase, op=op, name="drawn"),
        sizes=st.sampled_from(SIZES[op]),
        requests=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2)), max_size=4).map(tuple),
        padding_rows=st.integers(0, 2),
        **flags,
    )


def make_call(case: StateCase, dtype: torch.dtype, seed: int = 0) -> Call:
    """Draw a step on the CPU. What may not be read is NaN: padding rows, slots of fresh requests and of nobody."""
    generator = torch.Generator().manual_seed(seed)
    counts = [count for count, _ in case.requests]
    used = sum(counts)

    def draw(*size: int) -> Tensor:
        drawn = torch.randn(*size, generator=generator)
        return drawn if case.wide else drawn.to(dtype)

    def rows(*size: int, wide: bool = False) -> Tensor:
        gap = 5 if case.strided else 0
        drawn = torch.randn(used + case.padding_rows, *size[:-1], size[-1] + gap, generator=generator)[..., gap:]
        drawn[used:] = torch.nan
        return drawn if wide and case.wide else drawn.to(dtype)

    arguments, slot = OPS[case.op][0](draw, rows, case), OPS[case.op][1](*case.sizes)
    pool, slots = _draw_pool(case.requests, slot, generator)
    if case.op == "wkv" and len(pool):
        pool[..., 1] = pool[..., 1].abs()  # the denominator, a sum of exponentials
    if case.op == "mlstm":
        pool[..., -1, :-1] *= 0.0  # zeros in front of m; NaN stays
    metadata = {
        "state_pool": pool.to(dtype) if case.op == "causal_conv1d" else pool,
        "cu_seqlens_q": torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        "context_lens": torch.tensor([sum(request) for request in case.requests], dtype=torch.int32),
        "state_slots": slots,
    }
    options = {"silu": case.silu} if case.op == "causal_conv1d" else {}
    return Call(op=case.op, arguments=arguments | metadata | options)


def _draw_pool(
    requests: tuple[tuple[int, int], ...], slot: tuple[int, ...], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    order = torch.randperm(len(requests) + 2, generator=generator)
    pool = torch.full((len(order), *slot), torch.nan)
    slots = order[: len(requests)].clone()
    for n, (rows, past) in enumerate(requests):
        if past:
            pool[slots[n]] = torch.randn(slot, generator=generator)
        elif not rows:
            slots[n] = -1  # it was never given one
    return pool, slots


def exact(call: Call) -> tuple[Tensor, Tensor | None]:
    """The reference's result and pool in float64, from the same (rounded) arguments."""
    wide = call.to(torch.float64)
    return wide.run(state_reference), wide.pool


@functools.cache
def exact_step(case: StateCase, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """`exact` of the case's call, kept: it takes longer than any kernel. Not to be changed."""
    return exact(make_call(case, dtype))
