"""What torch has for the same cells: `varlen_attn` and a compiled `flex_attention`, in turns with our kernel.

They get keys and values in a layout of their own, made before the clock runs: `varlen_attn` in blocks of 256 where it
takes a block table (torch 2.12), else in one piece; `flex_attention` as a batch [N, K, context, D], which it reads with
no table, so that all requests of a cell must be as long for it. Our kernel also writes the step's keys and values.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_parts.attention import Requests, each, prefill_cells
from benchmarks.gpu_parts.failures import FAILURES, reason
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.mixed import mixed_steps
from benchmarks.gpu_parts.ragged_step import RaggedStep
from benchmarks.gpu_parts.step_check import check
from benchmarks.gpu_parts.timing import Timer, free_bytes

BLOCK = 256  # what FlashAttention 2 takes
FIRST = ("decode 32 x 4096", "decode 128 x 4096", "prefill 4096", "prefill 16384")


class CannotError(Exception):
    """A peer that does not have what a cell asks for, which is no failure."""


class Made(NamedTuple):
    """A peer's call on a cell, in what layout, and how its result becomes rows [T, H, D], which is not timed."""

    how: str
    call: Callable[[], Tensor]
    as_rows: Callable[[Tensor], Tensor] = torch.Tensor.contiguous


def run(context: Context) -> None:
    make = {"varlen_attn": varlen, "flex_attention": flex}[context.job.name]
    timer = Timer(context.device)

    def measure(name: str, step: RaggedStep) -> None:
        needed, free = 3 * step.kv_bytes, free_bytes(context.device)
        if needed > free:
            context.skip(name, f"needs {needed / 1e9:.0f} GB beside ours, {free / 1e9:.0f} GB are free")
            return
        try:
            made = make(step)
        except CannotError as error:
            context.skip(name, str(error))
            return
        check(step, made.as_rows(made.call()))
        theirs, about = timer.seconds(made.call, context.repeats), timer.about()
        ours = timer.seconds(step, context.repeats)
        figures = {"microseconds": 1e6 * theirs, "ours_microseconds": 1e6 * ours, "theirs_over_ours": theirs / ours}
        figures = {**figures, **about, **timer.about("ours_")}
        text = f"{1e6 * theirs:9.1f} us  {theirs / ours:5.2f} of ours ({made.how})"
        context.tell(context.job.row(name, figures=figures, text=text))

    each(context, [(f"{context.job.name}, {name}", requests) for name, requests in cells(context)], measure)


def cells(context: Context) -> Iterator[tuple[str, Requests]]:
    """Decodes that all have one length, which `flex_attention` needs, the prompts, and a prompt beside decodes, which
    it refuses; those first that say most: it is compiled for each, and the time does not do for all."""
    batches, lengths = ((3,), (40,)) if context.tiny else ((32, 128, 1, 8, 256), (4096, 512, 32_768))
    if context.quick:
        batches, lengths = (32, 1), (4096, 512)
    mixed = mixed_steps(context)[0]
    decodes = [(f"decode {batch} x {lengths[0]}", ((1, lengths[0]),) * batch) for batch in batches]
    found = [*decodes, *prefill_cells(context), (mixed.name, mixed.both)]
    yield from sorted(found, key=lambda cell: cell[0] not in (*FIRST, mixed.name))
    for length, batch in product(lengths[1:], batches):
        yield f"decode {batch} x {length}", ((1, length),) * batch


def varlen(step: RaggedStep) -> Made:
    """`torch.nn.attention.varlen.varlen_attn`, in the first of some ways whose result is right; what the others fail
    with stands beside it. Only the last of these reads keys and values more than once.

    Raises:
        ImportError: this torch does not have it.
    """
    attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    known = inspect.signature(attend).parameters
    in_one_piece = partial(varlen_in_one_piece, attend, known, step)
    ways = {"in one piece": in_one_piece, "repeated": partial(in_one_piece, repeated=True)}
    if "block_table" in known:
        ways = {"in blocks": partial(varlen_in_blocks, attend, step), **ways}
    refused = ""
    for name, way in ways.items():
        try:
            made = way()
            check(step, made.as_rows(made.call()))
            return made._replace(how=f"{made.how}{refused}")
        except FAILURES as error:
            if name == "repeated":
                raise
            refused += f"; {name} {reason(error)}"
    raise AssertionError("the last way must return or raise")


def varlen_in_blocks(attend: Callable[..., Any], step: RaggedStep) -> Made:
    contexts = [context for _, context in step.requests]
    needed = [-(-context // BLOCK) for context in contexts]
    table = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    for n, blocks in enumerate(torch.randperm(sum(needed)).to(torch.int32).split(needed)):
        table[n, : len(blocks)] = blocks
    pools = []
    for rows in step.keys_and_values():
        pool = torch.zeros(sum(needed), BLOCK, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
        for n, own in enumerate(rows.split(contexts)):
            slots = torch.arange(len(own))
            pool[table[n, slots // BLOCK].long().to(rows.device), (slots % BLOCK).to(rows.device)] = own
        pools.append(pool)
    table = table.to(step.query.device)
    rest = {"window_size": (-1, 0), "enable_gqa": True, "seqused_k": step.context_lens, "block_table": table}
    most = max(rows for rows, _ in step.requests), max(contexts)
    arguments = step.query, *pools, step.cu_seqlens_q, None, *most
    return Made(f"blocks of {BLOCK}", lambda: attend(*arguments, scale=step.scale, **rest))


def varlen_in_one_piece(attend: Callable[..., Any], known: Any, step: RaggedStep, *, repeated: bool = False) -> Made:
    """With fewer heads of keys than of queries, as the library takes them where nothing asks for it in so many words;
    or `repeated` for each head of queries."""
    keys, values = step.keys_and_values()
    how, rest = "keys in one piece", {}
    if repeated:
        group = step.shape.heads // step.shape.kv_heads
        keys, values = (rows.repeat_interleave(group, dim=1) for rows in (keys, values))
        how = f"{how}, repeated for each head"
    elif "enable_gqa" in known:
        rest["enable_gqa"] = True
    rest |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    ends = step.context_lens.cumsum(0, dtype=torch.int32)
    bounds = torch.cat([ends.new_zeros(1), ends])
    most = [max(sizes) for sizes in zip(*step.requests, strict=True)]
    arguments = step.query, keys, values, step.cu_seqlens_q, bounds, *most
    return Made(how, lambda: attend(*arguments, scale=step.scale, **rest))


def flex(step: RaggedStep) -> Made:
    """A kernel compiled for the cell's own sizes, as long as all of its requests have the same.

    Raises:
        CannotError: they do not.
    """
    module = importlib.import_module("torch.nn.attention.flex_attention")
    if len(set(step.requests)) != 1:
        raise CannotError("all requests must be as long for flex_attention without a block mask of their own")
    (rows, context), batch = step.requests[0], len(step.requests)
    whole = ((each, context) for each in step.keys_and_values())
    # [N, H, rows, D] and twice [N, K, context, D]
    query, keys, values = (
        each.unflatten(0, (batch, count)).transpose(1, 2).contiguous() for each, count in ((step.query, rows), *whole)
    )
    if rows > 1:
        assert rows == context, step.requests
        mask = module.create_block_mask(causal, None, None, rows, context, device=query.device)
    else:
        mask = None
    torch._dynamo.reset()  # each cell has a graph of its own, and Dynamo stops making some at the eighth
    compiled = module.flex_attention
    if query.is_cuda:  # else it is a dry run
        compiled = torch.compile(compiled, dynamic=False)

    def call() -> Tensor:
        found: Tensor = compiled(query, keys, values, block_mask=mask, scale=step.scale, enable_gqa=True)
        return found

    return Made("compiled for these sizes, keys in one piece", call, lambda found: found.transpose(1, 2).flatten(0, 1))


def causal(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return row >= column
