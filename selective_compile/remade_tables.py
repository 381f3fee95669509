"""Tables that a call makes anew where it has another number of tokens than the call before: made by every step.

    if seq_len != self.seq_len_cached:  # or `>`; or `if self.cos_cached is None or len(self.cos_cached) < seq_len`
        self.seq_len_cached, self.cos_cached = seq_len, cosines(seq_len)
    return self.cos_cached[:seq_len]

A trace of the model as a call has left it would hold for that number of tokens alone.  So it is traced as if no call
had been: then it makes its tables, of the number of tokens and of buffers, and leaves them; what it leaves is dropped
from the graph.  That the tables of an earlier call are as good is tried, with calls of several lengths in turn.
Declines where a table is made of tokens or of parameters, and where anything else is left in the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from selective_compile.captured import Captured
from selective_compile.first_call import left_by_call
from selective_compile.joined_graphs import inputs_of
from selective_compile.length_tables import is_length
from selective_compile.live_conditions import STEP
from selective_compile.live_settings import Read
from selective_compile.model_call import CANNOT, logits_call
from selective_compile.model_facts import device_of
from selective_compile.module_state import Place, attributes, lock_of, put, same_buffers, unchanged
from selective_compile.passes.normalise import place_of, source_name
from selective_compile.passes.refusals import RefusedError
from selective_compile.same_logits import agree
from selective_compile.trace_conditions import Condition
from selective_compile.unread_stores import asks, mentions

COUNTS = (5, 7)  # tokens of the calls that are compared: numbers that few sizes of a model are
IN_TURN = (5, 40, 9, 9, 3, 14)  # of those that follow one another
FARTHEST = 4096  # tokens of a call behind which others are tried
BUFFER = re.compile(r"\._buffers\['([^']*)'\]$")  # in Dynamo's way to one
NO_CALL = -1  # tokens of the last call, where there was none


def made_anew(model: nn.Module, capture: Callable[[], Captured]) -> Captured | None:
    """What ``capture`` gives as if ``model`` had not been called, less what it leaves; None where that is more than
    such tables, or its calls have none."""
    try:
        with lock_of(model), same_buffers(model):
            forgotten = forgotten_tables(model)
            if not forgotten or not same_in_turn(model, forgotten):
                return None
    except CANNOT:  # it cannot be called so
        return None
    try:
        with lock_of(model), put_instead(model, forgotten):
            captured = capture()
    except RefusedError:
        return None
    if not same_behind_long(model, captured, forgotten):
        return None
    return without_tables(model, captured, forgotten)


def forgotten_tables(model: nn.Module) -> dict[Place, Any]:
    """The numbers of tokens, and the tables, that calls leave, as if there had been none."""
    left = [left_by_call(model, count) for count in COUNTS]
    found: dict[Place, Any] = {}
    for place in left[0]:
        values = [each.get(place) for each in left]
        if all(type(value) is int for value in values) and values == list(COUNTS):
            found[place] = NO_CALL
        elif is_table(values):
            found[place] = None
    return found


def is_table(values: Sequence[Any]) -> bool:
    """Whether these are tensors of as many tokens as the calls had, and else of the same sizes; or rows of them."""
    if all(isinstance(value, (tuple, list)) and value for value in values):
        return len(set(map(len, values))) == 1 and all(map(is_table, zip(*values, strict=True)))
    shapes = [value.shape for value in values if isinstance(value, Tensor)]
    if len(shapes) < len(values) or len(set(map(len, shapes))) > 1:
        return False
    return {sizes for sizes in zip(*shapes, strict=True) if len(set(sizes)) > 1} == {COUNTS}


@contextmanager
def put_instead(model: nn.Module, values: Mapping[Place, Any]) -> Iterator[None]:
    """What there is only behind a call is left away where there was none."""
    own = attributes(model.modules())
    put({**own, **{place: value for place, value in values.items() if place in own}}, own)
    try:
        yield
    finally:
        put(own, attributes(model.modules()))


@torch.no_grad()
def same_in_turn(model: nn.Module, forgotten: Mapping[Place, Any], counts: Sequence[int] = IN_TURN) -> bool:
    """Whether calls of ``counts`` tokens, one behind another, give what each gives that no other came before."""

    def logits(count: int) -> Tensor:
        call, arguments = logits_call(model, ids_of(model, count))
        result: Tensor = call(*arguments)
        return result

    with unchanged(model):
        in_turn = [logits(count) for count in counts]
    alone = []
    for count in counts:
        with unchanged(model), put_instead(model, forgotten):
            alone.append(logits(count))
    return all(agree(one, other) for one, other in zip(in_turn, alone, strict=True))


def same_behind_long(model: nn.Module, captured: Captured, forgotten: Mapping[Place, Any]) -> bool:
    """Whether a call is the same behind one that is longer than the trace holds for, which may leave another table."""
    for end in captured.ends:
        if end > FARTHEST:
            return False
        try:
            with lock_of(model):
                if not same_in_turn(model, forgotten, (end + 1, COUNTS[0])):
                    return False
        except CANNOT:  # there is no such call
            continue
    return True


def ids_of(model: nn.Module, count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=device_of(model))[None] % 2


def without_tables(model: nn.Module, captured: Captured, forgotten: Mapping[Place, Any]) -> Captured | None:
    """``captured`` without what it stores; None where that is more than was ``forgotten``, or something reads what was
    there before."""
    paths = {module: path for path, module in model.named_modules()}
    places = {f"{paths[module]}.{name}".lstrip(".") for module, _, name in forgotten}
    names = {name for *_, name in forgotten}
    if not places.issuperset(captured.sets) or names & names_beside(model, forgotten):
        return None
    if not drop_tables(captured, names):
        return None
    conditions = tuple(one for one in captured.conditions if not is_of(one, places))
    if any(asks(one, names) for one in conditions):
        return None
    read = Read(names=captured.read.names - names, keys=captured.read.keys - names, code=captured.read.code)
    return replace(captured, sets=(), stored=frozenset(), conditions=conditions, read=read)


def names_beside(model: nn.Module, forgotten: Mapping[Place, Any]) -> set[str]:
    """Of attributes and buffers that were not."""
    own = attributes(model.modules())
    return {name for module, kind, name in own if kind != "part" and (module, kind, name) not in forgotten}


def is_of(condition: Condition, places: Collection[str]) -> bool:
    place = BUFFER.sub(r".\1", STEP.sub(r".\1", condition.source)).removeprefix("L['model'].")
    asked = {f"{place.removesuffix('.__dict__')}.{name}" for name in map(str, condition.given)}
    return place in places or not asked.isdisjoint(places)


def drop_tables(captured: Captured, names: set[str]) -> bool:
    """Leaves one result, the only one of tokens; whether the others are of sizes and buffers, and nothing reads what
    ``names`` were before."""
    graph = captured.module.graph
    inputs = dict(zip(inputs_of(captured.module), captured.examples, strict=True))
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    of_tokens = [result for result in results if isinstance(result, fx.Node) and not is_of_sizes(result, inputs)]
    if len(of_tokens) != 1 or any(mentions(source_name(node), names) for node in inputs):
        return False
    output.args = ((of_tokens[0],),)
    captured.module.recompile()
    return True


def is_of_sizes(result: fx.Node, inputs: Mapping[fx.Node, Any]) -> bool:
    """Whether it is made of nothing but how many tokens there are, and of buffers."""
    left, seen = [result], set[fx.Node]()
    while left:
        node = left.pop()
        if node in seen or is_length(node):
            continue
        seen.add(node)
        if node in inputs and (place_of(node) != "weight" or isinstance(inputs[node], nn.Parameter)):
            return False
        left += node.all_input_nodes
    return True
