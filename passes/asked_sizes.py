"""Within `group_proof`: whose rows those are that code asks about, when it asks whether there are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from selective_compile.part_ops import group_part
from selective_compile.passes.axes import Axes, Groups, size_expression
from selective_compile.passes.group_loops import GroupTrace
from selective_compile.passes.rules_chosen import FINDERS
from selective_compile.passes.rules_order import made_from

aten = torch.ops.aten


class AskedSizes:
    """The sizes in a trace: how many rows a mask chooses, or how many a group has, which the host may have read."""

    def __init__(self, trace: GroupTrace, axes: Mapping[fx.Node, Axes]) -> None:
        nodes = trace.module.graph.nodes
        self._finders = [node for node in nodes if node.target in FINDERS]
        self._parts = [node for node in nodes if node.target is group_part]
        self._read = {
            symbol: (counts, group)
            for symbol, (counts, group) in trace.read.items()
            if counts in axes and (groups := axes[counts].groups) is not None
            if groups == Groups(order=groups.order, unsorted=True)
        }
        self._axes = axes

    def found(self, symbol: sympy.Symbol) -> list[fx.Node]:
        """The nodes that find, or take, as many rows as ``symbol`` says."""
        parts = [node for node in self._parts if size_expression(node.meta["val"].shape[0]) == symbol]
        finders = [node for node in self._finders if size_expression(node.meta["val"][0].shape[0]) == symbol]
        return [*parts, *finders, *(node for node in self._finders if self._finds_group(node, symbol))]

    def cannot_all_be_empty(self, symbols: frozenset[sympy.Symbol]) -> bool:
        """Whether those are all groups of something: each token has one."""
        counted: dict[fx.Node, set[int]] = {}
        for counts, group in (self._read[symbol] for symbol in symbols if symbol in self._read):
            counted.setdefault(counts, set()).add(group)
        return any(len(groups) == counts.meta["val"].shape[0] for counts, groups in counted.items())

    def _finds_group(self, finder: fx.Node, symbol: sympy.Symbol) -> bool:
        """Whether it finds where that is so which ``symbol`` counts: ``groups == 3``."""
        mask: Any = finder.args[0]
        if symbol not in self._read or mask.target is not aten.eq.Scalar:
            return False
        counts, group = self._read[symbol]
        groups = self._axes[counts].groups
        return groups is not None and mask.args[1] == group and made_from(mask.args[0]) is groups.order
