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
from selective_compile.passes.evaluate import evaluate
from selective_compile.passes.lengths import ALL_LENGTHS
from selective_compile.passes.linear_attention import whole_linear_attention
from selective_compile.passes.normalise import normalise
from selective_compile.passes.recurrence_families import LINEAR_ATTENTION
from selective_compile.passes.recurrence_match import Recognised, applied
from selective_compile.passes.recurrences import READ, whole_convolutions
from selective_compile.passes.traced_graph import TracedGraph

BLOCKS = 4  # and a few tokens less, as a trace may be for less than a block


def is_of_one_block(captured: Captured, rewritten: Rewrite) -> bool:
    """Whether it has such a recurrence, and is for requests of so many tokens alone."""
    found = any(call.family == LINEAR_ATTENTION.name for call in rewritten.traced.recurrences)
    return found and rewritten.flat is not None and bool(captured.ends or rewritten.traced.ends)


@torch.no_grad()
def beyond_one_block(
    model: nn.Module, captured: Captured, rewritten: Rewrite, functions: Mapping[str, Recognised]
) -> Captured | None:
    """``captured`` and ``rewritten`` for longer requests, too; None where these are computed otherwise.

    ``functions``: what capture left whole.
    """
    block = min((*captured.ends, *rewritten.traced.ends))
    longest = min(BLOCKS * block, declared_positions(model) or ALL_LENGTHS)
    passed = {end for end in (*captured.ends, *rewritten.traced.ends) if end < longest}
    traced = normalise(captured.module, captured.examples)
    whole_convolutions(traced)
    whole_linear_attention(traced)
    for length in sorted({longest, *(end + 1 for end in passed)}, reverse=True):
        if not agrees(model, traced, functions, length):
            return None
    rewritten.traced.ends = [end for end in rewritten.traced.ends if end not in passed]
    return captured.without_ends(passed)


def agrees(model: nn.Module, traced: TracedGraph, functions: Mapping[str, Recognised], length: int) -> bool:
    """Whether ``model`` and its graph over all tokens, with recurrences in it, give the same logits."""
    ids = drawn(model, vocabulary_of(model), length, seed=length)
    tokens = dict(zip(TOKEN_INPUTS, logits_call(model, ids[None])[1], strict=False))

    def instead(node: fx.Node, arguments: tuple[Any, ...]) -> Tensor | None:
        if node.target is not function:
            return None
        tensors, name = arguments[:2]
        known = READ[name](node.args[0], node) if name in READ else functions[name]  # type: ignore[arg-type]
        return applied(known, tensors)

    try:
        with unchanged(model):
            expected = logits(model, ids)
        given = {item.node: tokens[item.source] for item in traced.tokens()}
        output: fx.Node = traced.output_node.args[0][0]  # type: ignore[index, assignment]
        found = evaluate(traced, output, batch=1, tokens=length, given=given, instead=instead, device=ids.device)
    except CANNOT:
        return False
    return not departs(model, list(zip(found[0], expected, strict=True)))
