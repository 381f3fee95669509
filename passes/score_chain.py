"""An eager attention's scores read backwards from the softmax: masks, softcap, scale, product of query and key."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from selective_compile.passes.attention_calls import MaskTerm
from selective_compile.passes.bias_lookups import bias_lookup
from selective_compile.passes.contraction import Contraction, contraction_of
from selective_compile.passes.evaluate import ancestors, evaluate, shaped_like
from selective_compile.passes.heads import Unreadable
from selective_compile.passes.rules_reduce import MAXIMA
from selective_compile.passes.traced_graph import TracedGraph

aten = torch.ops.aten
# Scores at or below this are taken as hidden: exp of the difference to any score of usable size is 0 in float32.
HIDDEN = -1e9
# A score that is put in the place of another hides it from here on, if any score of usable size is more than -9,000;
# of what is added to a score, so little may be a bias of far positions.  -10,000 as bfloat16 has it.
REPLACED = -9984.0
PASSED_THROUGH = (aten.to, aten.reshape, aten._to_copy, aten.clone, aten.contiguous, aten.type_as)


@dataclass(kw_only=True)
class ScoreChain:
    """``softcap * tanh(scale * q.k / softcap)`` plus masks; ``softcap`` 0 for none."""

    scale: float = 1.0
    softcap: float = 0.0
    masks: list[MaskTerm] = field(default_factory=list)
    product: Contraction | None = None
    product_node: Any = None
    sinks: fx.Node | None = None
    covers: list[fx.Node] = field(default_factory=list)
    narrowest: int = 8  # bytes of a score, wherever it went
    _after_tanh: float | None = None

    def multiply(self, factor: float) -> None:
        self.scale *= factor

    def tanh(self, node: fx.Node) -> None:
        if self._after_tanh is not None:
            raise Unreadable(node, "its scores pass through two tanh")
        self._after_tanh, self.scale = self.scale, 1.0

    def close(self, node: fx.Node) -> None:
        """At the product: the factor after a tanh is the softcap, the one before it the scale over the softcap."""
        if self._after_tanh is not None:
            self.softcap = self._after_tanh
            self.scale *= self.softcap
        if self.softcap < 0 or self.scale == 0:
            raise Unreadable(node, f"its scale {self.scale} or softcap {self.softcap} is out of range")


def read_scores(traced: TracedGraph, softmax: fx.Node) -> ScoreChain:
    """Raises `Unreadable` at the first operator that has no reading."""
    if softmax.args[1] not in along_keys(traced, softmax):
        raise Unreadable(softmax, "its softmax must run along the dimension of keys")
    chain, node = ScoreChain(), softmax.args[0]
    while True:
        assert isinstance(node, fx.Node)
        product = contraction_of(node)
        if product is not None:
            return finish(traced, chain, node, product)
        node = step_back(traced, chain, node)


def along_keys(traced: TracedGraph, node: fx.Node) -> tuple[int, int]:
    """Both names of the dimension of scores that keys have."""
    keys, rank = traced.axes[node].key_dims[-1], len(traced.axes[node].dims)
    return keys, keys - rank


def pair_of(traced: TracedGraph, node: fx.Node) -> tuple[int, int]:
    """The dimensions of scores that queries and keys have, from the last."""
    query, key = (dim - len(traced.axes[node].dims) for dim in traced.axes[node].key_dims)
    return query, key


def finish(traced: TracedGraph, chain: ScoreChain, node: fx.Node, product: Contraction) -> ScoreChain:
    if product.bias is not None and product.beta != 0:
        add_mask(traced, chain, node, product.bias, product.beta)
    chain.multiply(product.alpha if product.bias is not None else 1.0)
    chain.product, chain.product_node = product, node
    require_width(product.left, chain.narrowest)
    if len(product.summed) != 1:
        raise Unreadable(node, "queries and keys must be summed over exactly their head size")
    chain.close(node)
    return chain


def require_width(node: fx.Node, width: int) -> None:
    """A kernel keeps scores and weights in float32: rounding them to less than what they are made of would be lost."""
    if width < node.meta["val"].dtype.itemsize:
        raise Unreadable(node, "its scores or weights are rounded to a narrower type than its queries or values have")


def passes_through(node: fx.Node, operators: tuple[Any, ...]) -> bool:
    """Whether the node only moves scores or rounds them to another floating-point type."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet in operators and node.meta["val"].dtype.is_floating_point


def step_back(traced: TracedGraph, chain: ScoreChain, node: fx.Node) -> Any:
    """Take one operator into the chain; returns the node that carries the scores before it."""
    packet = getattr(node.target, "overloadpacket", None)
    if passes_through(node, PASSED_THROUGH):
        chain.narrowest = min(chain.narrowest, node.meta["val"].dtype.itemsize)
        return node.args[0]
    if packet in (aten.mul, aten.div) and not node.kwargs:
        first, second = node.args[:2]
        factor = only_number(traced, second)
        if factor:
            chain.multiply(factor if packet is aten.mul else 1 / factor)
            return first
        if packet is aten.mul and (factor := only_number(traced, first)):
            chain.multiply(factor)
            return second
    if packet is aten.mul and not node.kwargs:
        return take_factors(traced, chain, node)
    if packet is aten.tanh:
        chain.tanh(node)
        return node.args[0]
    if packet is aten.add and node.kwargs.get("alpha", 1) == 1:
        return take_added_mask(traced, chain, node)
    if packet is aten.sub and node.kwargs.get("alpha", 1) == 1:
        return take_off(traced, chain, node)
    if packet is aten.cat:
        return take_sinks(traced, chain, node)
    if packet in (aten.max, aten.maximum) and len(node.args) == 2 and carries_scores(traced, node.args[0]):
        return take_floor(traced, node)
    if packet is aten.masked_fill:
        return take_filled(traced, chain, node, scores=node.args[0], mask=node.args[1], fill=node.args[2], kind="drop")
    if packet is aten.where:
        return take_filled(traced, chain, node, scores=node.args[1], mask=node.args[0], fill=node.args[2], kind="keep")
    raise Unreadable(node, f"no reading for {node.target} between the product of queries and keys and the softmax")


def take_factors(traced: TracedGraph, chain: ScoreChain, node: fx.Node) -> Any:
    """``scores * mask`` of zeros and ones: what it multiplies with zero must be hidden by something nearer the softmax.

    Masks further from the softmax would be undone by it.
    """
    first, second = node.args[:2]
    scores, mask = (first, second) if carries_scores(traced, first) else (second, first)
    if not carries_scores(traced, scores) or not isinstance(mask, fx.Node) or carries_scores(traced, mask):
        raise Unreadable(node, f"no reading for {node.target} of two scores or of a number that is not known")
    chain.masks.append(MaskTerm(node=mask, kind="times", pair=pair_of(traced, node)))
    return scores


def take_added_mask(traced: TracedGraph, chain: ScoreChain, node: fx.Node) -> Any:
    first, second = node.args[:2]
    scores, mask = (first, second) if carries_scores(traced, first) else (second, first)
    if not carries_scores(traced, scores):
        raise Unreadable(node, "what is added to its scores is not a mask of positions")
    add_mask(traced, chain, node, mask)
    return scores


def add_mask(traced: TracedGraph, chain: ScoreChain, node: fx.Node, mask: Any, times: float = 1.0) -> None:
    """What is added before the scores are scaled is scaled with them."""
    if not isinstance(mask, fx.Node) or carries_scores(traced, mask):
        raise Unreadable(node, "what is added to its scores is not a mask of positions")
    if chain._after_tanh is not None:
        raise Unreadable(node, "a mask is applied before the scores are capped")
    refuse_behind_factors(chain, node)
    chain.masks.append(MaskTerm(node=mask, kind="add", factor=chain.scale * times, pair=pair_of(traced, node)))


def refuse_behind_factors(chain: ScoreChain, node: fx.Node) -> None:
    if any(term.kind == "times" for term in chain.masks):
        raise Unreadable(node, "a mask is applied before the scores are multiplied with another one")


def take_off(traced: TracedGraph, chain: ScoreChain, node: fx.Node) -> Any:
    """A mask, as ``scores * kept - 1e10 * (1 - kept)`` has one, or a bias; else the largest score."""
    scores, taken = node.args[:2]
    if not carries_scores(traced, scores) or not isinstance(taken, fx.Node) or carries_scores(traced, taken):
        return take_maximum(traced, chain, node)
    add_mask(traced, chain, node, taken, -1.0)
    return scores


def take_maximum(traced: TracedGraph, chain: ScoreChain, node: fx.Node) -> Any:
    """``scores - scores.max(-1)``: the same number taken off all scores of a query changes no weight."""
    scores, taken = node.args[:2]
    found = taken
    if getattr(found, "target", None) is operator.getitem and found.args[1] == 0:  # type: ignore[union-attr]
        found = found.args[0]  # type: ignore[union-attr]
    if getattr(found, "target", None) not in MAXIMA or found.args[0] is not scores:  # type: ignore[union-attr]
        raise Unreadable(node, "what is taken off its scores is not their own maximum")
    assert isinstance(found, fx.Node)
    keys = along_keys(traced, node)
    if found.args[1] not in (*keys, *([each] for each in keys)) or len(found.args) < 3 or not found.args[2]:
        raise Unreadable(node, "what is taken off its scores is not one number for each query")
    if chain._after_tanh is not None or chain.sinks is not None:
        raise Unreadable(node, "a number is taken off its scores before they are capped, or beside its sinks")
    chain.covers.append(found)
    return scores


def take_floor(traced: TracedGraph, node: fx.Node) -> Any:
    """``maximum(scores, least)``, with a least score that hides: what is above it stays as it is."""
    least = largest_of(traced, node.args[1])
    if least is None or not least <= replaced_by(node):
        raise Unreadable(node, "its scores are cut off from below")
    return node.args[0]


def take_sinks(traced: TracedGraph, chain: ScoreChain, node: fx.Node) -> Any:
    """``cat([scores, sinks], -1)``: one more score for each head, which no value belongs to."""
    parts: Any = node.args[0]
    last = len(traced.axes[node].dims) - 1
    if len(parts) != 2 or (node.args[1:] or (0,))[0] not in (-1, last) or not carries_scores(traced, parts[0]):
        raise Unreadable(node, "what is concatenated to its scores is not one sink for each head")
    no_factor_yet(chain, node)
    if chain.sinks is not None or chain.masks:
        raise Unreadable(node, "its sinks are masked, or it has several")
    chain.sinks = parts[1]
    return parts[0]


def take_filled(
    traced: TracedGraph, chain: ScoreChain, node: fx.Node, *, scores: Any, mask: Any, fill: Any, kind: Any
) -> Any:
    if not carries_scores(traced, scores) or carries_scores(traced, mask):
        raise Unreadable(node, "it must fill scores where a mask of positions says so")
    number = largest_of(traced, fill)
    if number is None or not number * chain.scale <= replaced_by(node):  # NaN hides nothing
        raise Unreadable(node, f"its hidden scores must be at most {REPLACED:g}, got {fill}")
    if chain._after_tanh is not None or chain.scale <= 0:
        raise Unreadable(node, "a mask is applied before the scores are capped or negated")
    refuse_behind_factors(chain, node)
    chain.masks.append(MaskTerm(node=mask, kind=kind, fill=number * chain.scale, pair=pair_of(traced, node)))
    return scores


def no_factor_yet(chain: ScoreChain, node: fx.Node) -> None:
    """Between sinks and the softmax nothing may scale the scores: it would scale the sinks as well."""
    if chain.scale != 1.0 or chain._after_tanh is not None:
        raise Unreadable(node, "its sinks are there before the scores are scaled or capped")


def largest_of(traced: TracedGraph, fill: Any) -> float | None:
    """A number, or the largest one in a tensor that depends on no input but buffers of the model, which are then proved
    from; None for what depends on another."""
    if isinstance(fill, fx.Node):
        inputs = {node for node in ancestors(fill) if node.op == "placeholder"}
        read = [given for given in traced.inputs if given.is_buffer and given.node in inputs]
        if len(read) < len(inputs) or fill not in traced.axes or not traced.axes[fill].is_constant:
            return None
        values = {given.node: given.example.cpu() for given in read if isinstance(given.example, torch.Tensor)}
        fill = evaluate(traced, fill, batch=1, tokens=2, given=values).max().item()
        traced.proved_from += [given for given in read if given not in traced.proved_from]
    return float(fill) if isinstance(fill, (int, float)) else None


def only_number(traced: TracedGraph, value: Any) -> float | None:
    """A number, or that of a tensor made in the graph that has no other; None for what depends on an input."""
    if isinstance(value, fx.Node):
        axes = traced.axes.get(value)
        if axes is None or not axes.is_constant or any(dim for dim in axes.dims):
            return None
    return largest_of(traced, value)


def replaced_by(node: fx.Node) -> float:
    """The largest number that hides the score whose place it takes."""
    return max(REPLACED, hidden_from(node.meta["val"].dtype))


def hidden_from(dtype: torch.dtype) -> float:
    """The largest number that hides a score of this type: float16 has none as low as `HIDDEN`."""
    return max(HIDDEN, torch.finfo(dtype).min) if dtype.is_floating_point else HIDDEN


def carries_scores(traced: TracedGraph, node: Any) -> bool:
    """Scores come out of a product of queries and keys; a mask of positions, or marks of keys, out of none, though it
    may be made in the shape of scores, and a bias be looked up in what is such a product."""
    if not isinstance(node, fx.Node) or node not in traced.axes:
        return False
    seen, stack = {mark.node for selection in traced.selections for mark in selection.marks}, [node]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if contraction_of(current) is not None:
            return True
        lookup = bias_lookup(traced, current)
        left_out = shaped_like(current) if lookup is None else lookup.source
        stack.extend(parent for parent in current.all_input_nodes if parent is not left_out)
    return False
