"""Whether longer requests go on as a recurrence does that was proved of one block alone: a trial on the model itself.

A linear attention that cuts a request into blocks is traced where there is one of them (`passes.linear_attention`), so
that the graph is for no more tokens than a block has.  What its model does behind is a loop that the trace has not
seen: its logits into a fourth block, where what a second one left of a first one counts, must be those of the graph
with the recurrence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from selective_compile.captured import Captured
from selective_compile.function_op import function
from selective_compile.model_call import CANNOT, TOKEN_INPUTS, logits_call
from selective_compile.model_facts import declared_positions
from selective_compile.module_state import unchanged
from selective_compile.one_token import departs, drawn, logits, vocabulary_of
from selective_compile.passes import Rewrite
from selective_compile.passes.convolutions import whole_convolutions
from selective_compile.passes.evaluate import evaluate
from selective_compile.passes.lengths import ALL_LENGTHS
from selective_compile.passes.linear_attention import whole_linear_attention
from selective_compile.passes.normalise import normalise
from selective_compile.passes.recurrence_families import LINEAR_ATTENTION
from selective_compile.passes.recurrence_match import Recognised, applied
from selective_compile.passes.recurrences import READ
from selective_compile.passes.traced_graph import TracedGraph

BLOCKS = 4  # and a few tokens less, as a trace may be for less than a block
LONGEST_TRIAL = 8192  # tokens


def is_of_one_block(captured: Captured, rewritten: Rewrite) -> bool:
    """Whether it has such a recurrence, and is for requests of so many tokens alone."""
    found = any(call.family == LINEAR_ATTENTION.name for call in rewritten.traced.recurrences)
    return found and rewritten.flat is not None and bool(captured.ends or rewritten.traced.ends)


@torch.no_grad()
def beyond_one_block(
    model: nn.Module, captured: Captured, rewritten: Rewrite, functions: Mapping[str, Recognised]
) -> Captured | None:
    """``captured`` and ``rewritten`` for longer requests, too; None where these are computed otherwise.

    ``functions``: what capture left whole.  A trace asks for no more tokens than a block has, or for less by one; what
    ends it later, as a table of positions does, stays where requests behind are not the same.
    """
    traced = normalise(captured.module, captured.examples)
    whole_convolutions(traced)
    whole_linear_attention(traced)
    declared = declared_positions(model) or ALL_LENGTHS
    ends, passed = sorted({*captured.ends, *rewritten.traced.ends}), set[int]()
    while ends and ends[0] < min(declared, LONGEST_TRIAL):  # a model may have blocks of several sizes
        block = ends[0]
        of_block, ends = [end for end in ends if end <= block + 1], [end for end in ends if end > block + 1]
        ids = drawn(model, vocabulary_of(model), min(BLOCKS * block, declared, LONGEST_TRIAL, *ends), seed=block)
        wanted = own_logits(model, ids)
        if wanted is None:
            break  # nor does the model itself go on
        found = of_graph(model, traced, functions, ids)
        if found is None or not agree(model, found, wanted, block):
            return None
        passed.update(of_block)
    rewritten.traced.ends = [end for end in rewritten.traced.ends if end not in passed]
    return captured.without_ends(passed)


def own_logits(model: nn.Module, ids: Tensor) -> Tensor | None:
    """``[S, V]``; None where the model cannot be called with so many tokens, whatever it says of that."""
    try:
        with unchanged(model):
            return logits(model, ids)
    except (*CANNOT, AssertionError, ArithmeticError):
        return None


def of_graph(model: nn.Module, traced: TracedGraph, functions: Mapping[str, Recognised], ids: Tensor) -> Tensor | None:
    """``[S, V]`` by the graph of ``model`` over all tokens, with recurrences in it; None where it is for fewer."""
    tokens = dict(zip(TOKEN_INPUTS, logits_call(model, ids[None])[1], strict=False))

    def instead(node: fx.Node, arguments: tuple[Any, ...]) -> Tensor | None:
        if node.target is not function:
            return None
        tensors, name = arguments[:2]
        known = READ[name](node.args[0], node) if name in READ else functions[name]  # type: ignore[arg-type]
        return applied(known, tensors)

    given = {item.node: tokens[item.source] for item in traced.tokens()}
    output: fx.Node = traced.output_node.args[0][0]  # type: ignore[index, assignment]
    try:
        found = evaluate(traced, output, batch=1, tokens=len(ids), given=given, instead=instead, device=ids.device)
    except CANNOT:
        return None
    return found[0] if found.shape[:2] == (1, len(ids)) else None


def agree(model: nn.Module, found: Tensor, wanted: Tensor, block: int) -> bool:
    """In each block by itself: in 16 bits most of some tokens count, and the first blocks are never others."""
    parts = zip(found.split(block), wanted.split(block), strict=True)
    return not any(departs(model, list(zip(*part, strict=True))) for part in parts)
