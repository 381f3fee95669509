"""Pass 1 for convolutions: what looks back over a few tokens, as nodes that a request's last tokens are kept for.

Short depthwise ones and shifts (`shifts`) have a ragged op::

    before:  conv1d(x [B, C, S], weight [C, 1, W], bias, padding=W - 1, groups=C) -> slice(2, 0, S)
    after:   selective.function([x, weight, bias], "causal convolution", [B, C, S])
    before:  pad(x [B, S, C], [0, 0, 1, -1])
    after:   selective.function([x, [[1, 0], ...]], "causal convolution", [B, S, C])

Others are products over what their tokens were a few tokens before::

    before:  conv1d(pad(x [B, C, S], [1, 0]), weight [O, C, 2], bias)
    after:   linear([x some tokens before, x], weight, bias)

Zeros may also stand in front of several, one behind the other, of which each takes some::

    before:  conv1d(conv1d(pad(x, [2, 0]), depthwise [C, 1, 2], inner), weight [O, C, 2], bias)
    after:   linear([first(x) a token before, first(x)], weight, bias)

where a first one of before is one of three tokens, the last of them weighed by 0: so the second has in front of a
request what the first makes of zeros, its bias, as there.

Or the tokens that each looks back on are put side by side, to be weighed as it says itself::

    before:  unfold(pad(x [B, C, S], [2, 0]), -1, 3, 1)
    after:   stack([x two tokens before, x a token before, x], -1)
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from selective_compile.passes.long_form import call
from selective_compile.passes.recurrences import CONVOLUTION, register, whole
from selective_compile.passes.shifts import Shift, shift_of, zeros_in_front
from selective_compile.passes.traced_graph import TracedGraph, arguments_of

aten = torch.ops.aten
DEFAULTS = (None, [1], [0], [1], 1)  # of a convolution: bias, stride, padding, dilation, groups
MOST_TAPS = 16  # of products: each is a copy of the tokens


@dataclass(frozen=True)
class Convolution:
    """``[B, C, S] -> [B, O, S - width + 1]``."""

    node: fx.Node
    source: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    padding: int
    groups: int

    @property
    def width(self) -> int:
        return int(self.weight.meta["val"].shape[2])

    @property
    def is_depthwise(self) -> bool:
        return tuple(self.weight.meta["val"].shape[:2]) == (self.groups, 1)


@dataclass(frozen=True)
class Chain:
    """Convolutions one behind the other over ``source``, ``[B, C, S]``, or ``[B, S, C]`` where it is ``turned``; of the
    zeros in front of it ``front`` are left in front of what they give."""

    source: fx.Node
    front: int
    turned: bool = False
    convolutions: tuple[Convolution, ...] = ()


def whole_convolutions(traced: TracedGraph) -> int:
    """Causal convolutions, and shifts by some tokens, become nodes of their own; returns how many."""
    found = 0
    for node in list(traced.graph.nodes):
        if (read := causal(node)) is not None:
            chain, last = read
            with traced.graph.inserting_before(node):
                written = Written(traced, chain).delayed(len(chain.convolutions) - 1, 0)
        elif (shift := shift_of(node)) is not None:
            written, last = shifted(traced, shift), node
        elif (windows := windows_of(node)) is not None:
            with traced.graph.inserting_before(node):
                written, last = side_by_side(traced, windows), node
        else:
            continue
        last.replace_all_uses_with(written)
        found += 1
    traced.graph.eliminate_dead_code()
    traced.module.recompile()
    return found


def causal(node: fx.Node) -> tuple[Chain, fx.Node] | None:
    """The convolutions that ``node`` is the last of, and the node whose value is a token's for each token; None if it
    is none, or if another one behind it takes what is left of the zeros in front."""
    last = convolution_of(node)
    if last is None:
        return None
    chain, end = chain_of(last), node
    if chain is None and last.padding == last.width - 1 and (cut := causal_cut(last)) is not None:
        chain, end = Chain(last.source, 0, convolutions=(last,)), cut
    return (chain, end) if chain is not None and chain.front == 0 and is_written(chain) else None


def convolution_of(node: fx.Node) -> Convolution | None:
    if node.target is not aten.conv1d.default or node.meta["val"].dim() != 3:
        return None
    given = arguments_of(node)
    settings: list[Any] = [*given, *DEFAULTS[len(given) - 2 :]]
    x, weight, bias, stride, padding, dilation, groups = settings
    plain = list(stride) == [1] and list(dilation) == [1] and isinstance(padding[0], int)
    return Convolution(node, x, weight, bias, padding[0], groups) if plain else None


def chain_of(last: Convolution) -> Chain | None:
    """Back to the zeros in front that all of them read."""
    if last.padding:
        return None
    before = convolution_of(last.source)
    chain = behind_zeros(last.source) if before is None else chain_of(before)
    if chain is None or chain.front < last.width - 1:
        return None
    return dataclasses.replace(chain, front=chain.front - last.width + 1, convolutions=(*chain.convolutions, last))


def behind_zeros(node: fx.Node) -> Chain:
    if (padded := zeros_in_front(node, 2)) is not None:
        return Chain(*padded)
    turned = node.target is aten.transpose.int and {dim % 3 for dim in arguments_of(node)[1:]} == {1, 2}
    if turned and (padded := zeros_in_front(arguments_of(node)[0], 1)) is not None:
        return Chain(*padded, turned=True)
    return Chain(node, 0)


def causal_cut(last: Convolution) -> fx.Node | None:
    """The slice that leaves of a convolution, padded on both sides, what looks back alone."""
    users = list(last.node.users)
    if len(users) != 1 or users[0].target is not aten.slice.Tensor:
        return None
    (cut,) = users
    bounds: list[Any] = [*arguments_of(cut), 0, None]
    dim, start = bounds[1:3]
    every = str(cut.meta["val"].shape[2]) == str(last.source.meta["val"].shape[2])
    return cut if dim in (2, -1) and start in (0, None) and every else None


def is_written(chain: Chain) -> bool:
    """Whether each has a form here: one that is depthwise behind another has none, nor has one over many tokens."""
    first, *others = chain.convolutions
    taps = 1 if first.is_depthwise else first.width
    for other in others:
        taps *= other.width
    return taps <= MOST_TAPS and not any(other.is_depthwise for other in others)


@dataclass(frozen=True)
class Windows:
    """Of each token of ``source``, ``[B, C, S]`` or ``[B, S, C]``, those in front of it and itself, ``size`` in all."""

    node: fx.Node
    source: fx.Node
    size: int


def windows_of(node: fx.Node) -> Windows | None:
    """What an unfold along tokens reads, if as many zeros are in front of them as each looks back."""
    if node.target is not aten.unfold.default or node.meta["val"].dim() != 4:
        return None
    rows, dim, size, step = arguments_of(node)
    rows = all_of(rows)
    padded = zeros_in_front(rows, dim % 3) if dim % 3 else None
    if padded is None or step != 1 or not isinstance(size, int) or not 1 < size <= MOST_TAPS:
        return None
    source, front = padded
    sizes = source.meta["val"].shape
    tokens = not isinstance(sizes[dim % 3], int) and isinstance(sizes[3 - dim % 3], int)
    return Windows(node, source, size) if tokens and front == size - 1 else None


def all_of(rows: fx.Node) -> fx.Node:
    """What a slice leaves nothing out of, as one for as many of the last tokens as there are."""
    if rows.target is not aten.slice.Tensor:
        return rows
    source: fx.Node = arguments_of(rows)[0]
    return source if str(source.meta["val"].shape) == str(rows.meta["val"].shape) else rows


def side_by_side(traced: TracedGraph, windows: Windows) -> fx.Node:
    source = windows.source
    taps = [moved(traced, source, tokens) if tokens else source for tokens in reversed(range(windows.size))]
    return call(aten.stack.default, taps, 3, like=windows.node)


@dataclass
class Written:
    """The nodes of a chain, in front of the node where they are inserted."""

    traced: TracedGraph
    chain: Chain
    made: dict[tuple[int, int], fx.Node] = field(default_factory=dict)

    def delayed(self, place: int, tokens: int) -> fx.Node:
        """``[B, C, S]``: what the convolution at that place gave so many tokens before; the source is at -1."""
        if (place, tokens) not in self.made:
            self.made[place, tokens] = self.write(place, tokens)
        return self.made[place, tokens]

    def write(self, place: int, tokens: int) -> fx.Node:
        if place < 0:
            return moved(self.traced, self.delayed(-1, 0), tokens) if tokens else self.source()
        this = self.chain.convolutions[place]
        if this.is_depthwise:
            return depthwise(self.traced, self.delayed(-1, 0), this, tokens)
        return product([self.delayed(place - 1, tokens + back) for back in reversed(range(this.width))], this)

    def source(self) -> fx.Node:
        """``[B, C, S]``"""
        source = self.chain.source
        return call(aten.transpose.int, source, 1, 2, like=source) if self.chain.turned else source


def depthwise(traced: TracedGraph, x: fx.Node, this: Convolution, tokens: int) -> fx.Node:
    """``[B, C, S]``: what a convolution gave so many tokens before, by one that weighs those since by 0."""
    rows = call(aten.squeeze.dim, this.weight, 1, like=this.weight)
    rows = call(aten.constant_pad_nd.default, rows, [0, tokens], like=rows) if tokens else rows
    tensors = [x, rows, *([] if this.bias is None else [this.bias])]
    return whole(traced, tensors, CONVOLUTION, shaped=x, like=this.node)


def moved(traced: TracedGraph, rows: fx.Node, tokens: int) -> fx.Node:
    """Rows ``[B, C, S]`` or ``[B, S, C]`` of so many tokens before, by weighing the oldest by 1 and others by 0."""
    value = rows.meta["val"]
    channels = next(size for size in (value.shape[2], value.shape[1]) if isinstance(size, int))
    weight = torch.zeros(channels, tokens + 1, dtype=value.dtype, device=value.device)
    weight[:, 0] = 1
    constant = register(traced, f"shift_{rows.name}_{tokens}", weight)
    return whole(traced, [rows, constant], CONVOLUTION, shaped=rows, like=rows)


def shifted(traced: TracedGraph, shift: Shift) -> fx.Node:
    """``[B, S, C]``"""
    with traced.graph.inserting_before(shift.first):
        rows = moved(traced, shift.source, shift.tokens)
        linear = shift.through
        return rows if linear is None else call(linear.target, rows, *arguments_of(linear)[1:], like=linear)


def product(taps: list[fx.Node], this: Convolution) -> fx.Node:
    """``[B, O, S]``: a matrix for each group, times what its channels were, the oldest tokens first."""
    groups, (outputs, channels, width) = this.groups, this.weight.meta["val"].shape
    batch, tokens = (call(aten.sym_size.int, taps[0], dim, like=taps[0]) for dim in (0, 2))
    like, inner = this.node, channels * width
    x = call(aten.stack.default, taps, 3, like=like)
    x = call(aten.reshape.default, x, [batch, groups, channels, tokens, width], like=like)
    x = call(aten.permute.default, x, [0, 1, 3, 2, 4], like=like)
    x = call(aten.reshape.default, x, [batch, groups, tokens, inner], like=like)
    matrices = call(aten.reshape.default, this.weight, [groups, outputs // groups, inner], like=this.weight)
    x = call(aten.matmul.default, x, call(aten.transpose.int, matrices, 1, 2, like=matrices), like=like)
    if this.bias is not None:
        each = call(aten.reshape.default, this.bias, [groups, 1, outputs // groups], like=this.bias)
        x = call(aten.add.Tensor, x, each, like=like)
    x = call(aten.transpose.int, x, 2, 3, like=like)
    return call(aten.reshape.default, x, [batch, outputs, tokens], like=like)
