"""Proves that code with a loop over the groups that some token chose is one graph, whichever groups these are.

The graph in which the loop goes round for all groups stands for all others if, first, what finds the groups leaves out
only those that no token chose; and if, second, the graph of a trace with fewer rounds is the full one without the rows
that those groups would have added.  Then a group that is left out would have added no rows: nothing is lost or gained
by its round.  The second is shown for several sets of groups: a count of rounds, a value handed from round to round or
a first round that differs from the others would change one of them.  So it is for code that goes round for all groups,
and leaves out those that it finds no tokens of.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from selective_compile.part_ops import joined_parts
from selective_compile.passes.asked_sizes import AskedSizes
from selective_compile.passes.axes import Axes, Mixes, size_expression
from selective_compile.passes.group_loops import LENGTHS, Answers, Given, GroupError, GroupTrace, trace_groups
from selective_compile.passes.rules_chosen import FINDERS
from selective_compile.passes.rules_order import CASTS
from selective_compile.passes.traced_graph import is_mutable

aten = torch.ops.aten
Run = Callable[[list[Tensor]], list[Tensor]]
SQUEEZES = (aten.squeeze, aten.unsqueeze, aten.permute, aten.transpose)
DIVISIONS = (aten.div, aten.floor_divide)  # of the numbers of (token, group) pairs, which gives those of tokens
SHAPES = (aten.squeeze, aten.unsqueeze, aten.view, aten.reshape, aten.flatten)
COPIES = (aten.to, aten._to_copy, aten.clone, aten.contiguous)
NOT_ZERO = (aten.gt.Scalar, aten.greater.Scalar, aten.ne.Scalar, aten.not_equal.Scalar)
NO_FIND = "asks whether nothing was found of something else than what a group of tokens is"
FEW = 3  # groups
SMALL = 16  # numbers in a constant of the code; weights are told apart by identity


def prove_any_groups(run: Run, given: Sequence[Given], full: GroupTrace, axes: Mapping[fx.Node, Axes]) -> None:
    """Raises `Mixes` unless ``full``, of `trace_all`, is right whichever groups tokens choose; or as `trace_groups`.

    ``axes``: of all its values.
    """
    table: dict[Any, int] = {}
    if full.told_length:
        prove_any_length(run, given, full, table)
    if full.asked_alone:
        prove_any_empty(run, given, full, axes, table)
    if not full.hits:
        return
    chosen = chosen_groups(full)
    for group in full.entered:
        if not full.asked.get(group, set()) <= sizes_found(chosen.get(group, ())):
            raise Mixes(NO_FIND)
    for answers in other_answers(full):
        assert answers.entered is not None
        left_out = (full.entered - answers.entered) | answers.empty
        compare(
            run, given, answers, numbered(full.module, table, rows_added(full.module.graph, chosen, left_out)), table
        )


def compare(run: Run, given: Sequence[Given], answers: Answers, expected: Any, table: dict[Any, int]) -> None:
    """Raises `Mixes` unless the code is that with these answers."""
    other = trace_groups(run, given, answers).module
    if any(is_mutable(node) for node in other.graph.nodes if node.op == "call_function"):
        raise Mixes("changes a tensor in place where a group of tokens has none")
    if numbered(other, table, frozenset()) != expected:
        raise Mixes("does something else for the tokens of a group where other groups have none")


def prove_any_length(run: Run, given: Sequence[Given], full: GroupTrace, table: dict[Any, int]) -> None:
    """Of how many the code is told are found."""
    expected = numbered(full.module, table, frozenset())
    for length in LENGTHS[1:]:
        answers = Answers(entered=full.entered if full.hits else None, length=length)
        if numbered(trace_groups(run, given, answers).module, table, frozenset()) != expected:
            raise Mixes("does something else where a group has another number of tokens")


def prove_any_empty(
    run: Run, given: Sequence[Given], full: GroupTrace, axes: Mapping[fx.Node, Axes], table: dict[Any, int]
) -> None:
    """Of what is asked about outside of a loop over groups that were hit."""
    asked = AskedSizes(full, axes)
    chosen = {number: asked.found(symbol) for number, symbol in enumerate(full.asked_alone)}
    if not all(chosen.values()):
        raise Mixes(NO_FIND)
    for empty in left_out_in_turn(frozenset(chosen)):
        gone = frozenset(full.asked_alone[number] for number in empty)
        if asked.cannot_all_be_empty(gone):
            continue
        expected = numbered(full.module, table, rows_added(full.module.graph, chosen, empty), gone)
        compare(run, given, Answers(empty_alone=empty), expected, table)


def trace_all(run: Run, given: Sequence[Given]) -> GroupTrace:
    """With a round for every group, but for one that the code fails for, as a number that stands for no expert."""
    try:
        return trace_groups(run, given)
    except GroupError as error:
        groups, failing = error.groups, error.group
    wrong = Mixes("fails for some groups of tokens, or after some others")
    try:
        trace_groups(run, given, Answers(entered=frozenset({failing})))
    except GroupError:
        pass
    else:
        raise wrong
    try:
        return trace_groups(run, given, Answers(entered=frozenset(range(groups)) - {failing}))
    except GroupError as error:
        raise wrong from error


def other_answers(full: GroupTrace) -> Iterator[Answers]:
    """Without the rounds of some groups; where nothing is found in some others, if the code asks."""
    before = full.entered
    for part in left_out_in_turn(full.entered):
        yield Answers(entered=full.entered - part, empty=before - part if full.asked else frozenset())
        before = part


def left_out_in_turn(groups: frozenset[int]) -> list[frozenset[int]]:
    """Sets of groups that no token chose: all; of few groups every set; of many all but one or two, one or two, and by
    each bit of their numbers those that have it or have it not, so that any two groups are told apart."""
    ordered = sorted(groups)
    if len(ordered) <= FEW:
        chosen = [[g for i, g in enumerate(ordered) if bits >> i & 1] for bits in range(1, 2 ** len(ordered))]
        return [frozenset(each) for each in reversed(chosen)]
    ends = [frozenset(ordered[:1]), frozenset(ordered[-1:]), frozenset(ordered[:2])]
    bits = [frozenset(g for i, g in enumerate(ordered) if i >> b & 1) for b in range((len(ordered) - 1).bit_length())]
    found = [groups, *ends, *(groups - end for end in ends), *bits, *(groups - those for those in bits)]
    return list(dict.fromkeys(found))


def chosen_groups(trace: GroupTrace) -> dict[int, list[fx.Node]]:
    """By group, the nodes that find its tokens in the mask whose groups without tokens the loop leaves out."""
    if len(trace.hits) != 1:
        raise Mixes("loops over groups of tokens several times")
    graph = trace.module.graph
    mask, dim = mask_of_hits(trace.hits[0])
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in FINDERS:
            part = behind(node.args[0], (*CASTS, *SQUEEZES))
            group = group_of(part, mask, dim, trace.module)
            if group is not None:
                found.setdefault(group, []).append(node)
    return found


def group_of(part: fx.Node, mask: fx.Node, dim: int, module: fx.GraphModule) -> int | None:
    """Which entry of ``mask`` along ``dim`` the node is."""
    if part.target is aten.select.int:
        source, along, index = part.args
    elif part.target is aten.index.Tensor:
        source, (along, index) = part.args[0], one_index(part.args[1], module)
    else:
        return None
    if behind(source, COPIES) is not mask or not isinstance(along, int) or not isinstance(index, int):
        return None
    return index % mask.meta["val"].shape[dim] if along % rank(mask) == dim else None


def one_index(indices: Any, module: fx.GraphModule) -> tuple[int, int] | tuple[None, None]:
    """The dimension that is indexed, and by which number, if it is one number that the code knows."""
    used = [dim for dim, index in enumerate(indices) if index is not None]
    index = getattr(module, str(indices[used[0]].target)) if indices[used[0]].op == "get_attr" else None
    if len(used) != 1 or index is None or index.numel() != 1 or index.dtype is torch.bool:
        return None, None
    return used[0], int(index)


def mask_of_hits(hits: fx.Node) -> tuple[fx.Node, int]:
    """The mask ``[..., E, ...]`` and its dimension of groups; ``hits`` are those with an entry that is not 0."""
    wrong = Mixes("loops over other groups than those that some token chose")
    if hits.target is not aten.nonzero.default:
        raise wrong
    test = behind(hits.args[0], CASTS)
    if test.target in NOT_ZERO and test.args[1] == 0:
        (test, _) = test.args  # type: ignore[assignment]
        if test.target is not aten.sum.dim_IntList or test.kwargs:  # a type of few bits may hold no large sum
            raise wrong
    elif test.target is not aten.any.dims:
        raise wrong
    mask = behind(test.args[0], COPIES)
    if not counts(mask):
        raise wrong
    gone = {dim % rank(mask) for dim in test.args[1]}  # type: ignore[union-attr,operator]
    left = [dim for dim in range(rank(mask)) if dim not in gone]
    if len(left) != 1:
        raise wrong
    return mask, left[0]


def counts(mask: fx.Node) -> bool:
    """Whether all entries are 0 or 1: a sum is 0 only where all of them are, and a cast keeps them apart."""
    source = behind(mask, (*CASTS, *SQUEEZES))
    return source.target is aten.one_hot.default or source.meta["val"].dtype == torch.bool


def behind(node: Any, packets: Sequence[Any]) -> fx.Node:
    while getattr(node.target, "overloadpacket", None) in packets:
        node = node.args[0]
    assert isinstance(node, fx.Node)
    return node


def rank(node: fx.Node) -> int:
    return int(node.meta["val"].dim())


def sizes_found(finders: Sequence[fx.Node]) -> set[sympy.Symbol]:
    return {finder.meta["val"][0].shape[0].node.expr for finder in finders}


def rows_added(graph: fx.Graph, chosen: dict[int, list[fx.Node]], groups: frozenset[int]) -> frozenset[fx.Node]:
    """The nodes that add something to the rows of the tokens of ``groups``, and to no others."""
    finders = {finder for group in groups for finder in chosen.get(group, ())}
    return frozenset(node for node in graph.nodes if finder_of(rows_of(node)) in finders)


def rows_of(node: fx.Node) -> Any:
    """By which a node adds to rows, or writes them."""
    if node.target is aten.index_add.default:
        return node.args[2]
    if node.target is aten.index_put.default:
        return next(index for index in node.args[1] if index is not None)  # type: ignore[union-attr]
    return None


def finder_of(rows: Any) -> Any:
    found = behind(rows, (*SHAPES, *CASTS, *DIVISIONS)) if isinstance(rows, fx.Node) else None
    return found.args[0] if found is not None and found.target is operator.getitem else found


def numbered(
    module: fx.GraphModule,
    table: dict[Any, int],
    skipped: frozenset[fx.Node],
    gone: frozenset[sympy.Symbol] = frozenset(),
) -> Any:
    """What the graph returns, as numbers that are the same for the same computation; ``skipped`` nodes return their
    first argument, and of parts that are put together those are left out that have as many rows as is ``gone``."""
    numbers: dict[fx.Node, int] = {}

    def argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return "node", numbers[value]
        if isinstance(value, (list, tuple)):
            return tuple(map(argument, value))
        if isinstance(value, slice):
            return "slice", argument((value.start, value.stop, value.step))
        return type(value), value

    inputs = 0
    for node in module.graph.nodes:
        if node in skipped:
            numbers[node] = numbers[node.args[0]]
            continue
        if node.op == "output":
            return argument(node.args[0])
        if node.op == "placeholder":
            key: Any = ("input", inputs)
            inputs += 1
        elif node.op == "get_attr":
            key = ("constant", *identity(getattr(module, str(node.target))))
        else:
            args = node.args if node.target is not joined_parts else (without(node.args[0], gone), *node.args[1:])
            keywords = tuple((name, argument(value)) for name, value in sorted(node.kwargs.items()))
            key = (node.target, argument(args), keywords)
        numbers[node] = table.setdefault(key, len(table))
    raise AssertionError("a graph has an output")


def without(parts: Any, gone: frozenset[sympy.Symbol]) -> list[fx.Node]:
    return [part for part in parts if size_expression(part.meta["val"].shape[0]) not in gone]


def identity(constant: Tensor) -> tuple[Any, ...]:
    if constant.numel() > SMALL or isinstance(constant, torch.nn.Parameter):
        return (id(constant),)
    return (constant.dtype, tuple(constant.shape), tuple(constant.flatten().tolist()))
