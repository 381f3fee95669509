"""A module that runs by itself, request after request, inside the flat graph."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, fx

from selective_compile.isolated_op import OutputSizes
from selective_compile.passes.evaluate import evaluate

if TYPE_CHECKING:
    from selective_compile.passes.traced_graph import TracedGraph


class WholeModules(Protocol):
    """The modules that capture left whole, to be traced by themselves."""

    def likeness(self, path: str) -> Hashable:
        """The same for modules that are the same but for the values of their weights."""

    def run(self, path: str, structure: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that a copy of the module returns, called with ``structure`` (`IsolatedCall`) of ``tensors``."""

    def let_store(self, path: str) -> bool:
        """Whether runs of the module have raised for attributes that it sets, and will not as long as it does not read
        them before: what it sets is then left nowhere."""

    def stored(self, path: str) -> Sequence[str]:
        """The names of such attributes."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A value made of the number of a request's tokens alone, as a mask of queries by keys is."""

    graph: TracedGraph  # as it was captured: the passes change their own
    node: fx.Node

    @property
    def token_dims(self) -> tuple[int, ...]:
        """Its dimensions that grow with the number of tokens."""
        return tuple(i for i, size in enumerate(self.node.meta["val"].shape) if not isinstance(size, int))

    @torch.no_grad()
    def __call__(self, tokens: int) -> Tensor:
        """The value that the model computes for a request of ``tokens`` tokens."""
        device = self.node.meta["val"].device  # the model's own: it is of every step
        return evaluate(self.graph, self.node, batch=1, tokens=tokens, given={}, device=device)


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One tensor that the module is called with.

    ``rows``: one entry for each token along ``dim``, and ``value`` is its number among the operator's values;
    ``constant``: the same for every request, likewise; ``whole``: found from the request's length; ``handed``: for each
    request what an earlier isolated call, number ``call``, gave as its ``value``-th tensor.
    """

    kind: Literal["rows", "constant", "whole", "handed"]
    value: int = 0
    dim: int = 0
    whole: Whole | None = None
    call: int = 0

    @property
    def is_pair(self) -> bool:
        """Whether it has a row for each token and a column for each: a mask of queries by keys."""
        return self.whole is not None and len(self.whole.token_dims) == 2


@dataclass(frozen=True, kw_only=True)
class IsolatedCall:
    """One call of an isolated module.

    Attributes:
        module: its path in the model.
        node: the operator, in the captured graph and then in the flat one.
        structure: its arguments, tensors replaced by their numbers (see `skeleton.rebuilt`).
        arguments: one for each of those tensors.
        results: which of the tensors it returns are used.
        sizes: of these.
        token_dims: the dimension that enumerates tokens in each of these.
        token_wise: whether it was proved to treat tokens independently, and so runs once, on the rows of all requests.
    """

    module: str
    node: fx.Node
    structure: Any
    arguments: tuple[Argument, ...]
    results: tuple[int, ...]
    sizes: OutputSizes
    token_dims: tuple[int, ...]
    source_line: str
    token_wise: bool = False
