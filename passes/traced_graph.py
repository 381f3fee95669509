"""The decoder's graph as it goes through the passes, with what each pass has found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from selective_compile.passes.attention_calls import AttentionCall, KeySelection
from selective_compile.passes.axes import Axes, Sizes
from selective_compile.passes.isolated_call import IsolatedCall, WholeModules
from selective_compile.passes.refusals import Refusal, module_path, source_line

Place = Literal["weight", "tokens", "size", "other"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the rows that our kernels take
# Where Dynamo finds an attribute of the module that is traced, or of one in it, or what a file has by a name; one of
# numpy's, as a tensor.
OF_NUMPY = "___from_numpy("
OF_MODULE = re.compile(rf"({re.escape(OF_NUMPY)})?(L\['(self|model)'\]\.|G\[)")


@dataclass(frozen=True, kw_only=True)
class Input:
    """One placeholder of the captured graph: where its value comes from and what it is."""

    index: int
    node: fx.Node
    source: str
    place: Place
    example: torch.Tensor | int

    @property
    def is_buffer(self) -> bool:
        """Whether it is a tensor of the model that training does not change: a buffer, or another attribute."""
        own = OF_MODULE.match(self.source) or "_buffers[" in self.source
        trained = "_parameters[" in self.source or (
            isinstance(self.example, torch.Tensor) and self.example.requires_grad
        )
        return self.place == "weight" and bool(own) and not trained


@dataclass(frozen=True, kw_only=True)
class TokenTensor:
    """A tensor that a recurrence reads: ``[B, ..., S, ...]``, or a weight where ``token_dim`` is None."""

    node: fx.Node
    token_dim: int | None


@dataclass(frozen=True, kw_only=True)
class RecurrentCall:
    """One recurrence or convolution: ``output`` is the node whose value its ragged op replaces.

    ``run(**tensors, **options, state_pool, cu_seqlens_q, context_lens, state_slots)`` takes and gives ``[T, ...]``.
    ``state_shape``, ``state_dtype``: what is kept of one request from step to step.
    ``unlimited_steps``: ``run`` is also told which tokens were generated, as ``unlimited``.
    """

    name: str
    family: str
    run: Callable[..., Any]
    output: fx.Node
    output_token_dim: int
    tensors: Mapping[str, TokenTensor]
    options: Mapping[str, Any]
    state_shape: tuple[int, ...]
    state_dtype: torch.dtype
    source_line: str
    unlimited_steps: bool = False


@dataclass(kw_only=True)
class TracedGraph:
    """An ATen graph over ``[B, S]`` tokens and what was proved of it so far.

    ``narrowings`` are refusals of the graph as a whole, for sizes that it does not hold for; analyses name the nodes
    where they can, so these come last.  ``conditions`` are all that was asked of sizes, as expressions.  ``ends``
    are the longest requests that each of them holds for, but those that hold for any.  ``functions`` are those left
    whole by capture, with what they are known to compute (`recurrence_match.Recognised`).  ``modules`` runs copies of
    the modules that capture left whole, to see what they compute; None where there are none.  ``proved_from`` are
    buffers of the model whose values a proof has read: it holds as long as they stay.  ``makes_constants``: the forward
    stores a tensor that no input of a call decides, as one does that makes a table when it is first called.
    ``left_out``: attributes of the model that its forward sets, and does not read, and the graph leaves as they are.
    ``ahead``: positions from which on values that isolated modules are given tell of later ones.
    ``long_beyond``: of requests of more tokens the graph is told by marks on ``long_numbers`` (`long_form`); None: it
    knows of none.
    """

    module: fx.GraphModule
    inputs: list[Input]
    sizes: Sizes
    axes: dict[fx.Node, Axes] = field(default_factory=dict)
    sequence_nodes: dict[fx.Node, str] = field(default_factory=dict)
    calls: list[AttentionCall] = field(default_factory=list)
    selections: list[KeySelection] = field(default_factory=list)
    isolated: list[IsolatedCall] = field(default_factory=list)
    recurrences: list[RecurrentCall] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    narrowings: list[Refusal] = field(default_factory=list)
    conditions: tuple[sympy.Basic, ...] = ()
    functions: Mapping[str, Any] = field(default_factory=dict)
    modules: WholeModules | None = None
    ends: list[int] = field(default_factory=list)
    proved_from: list[Input] = field(default_factory=list)
    makes_constants: bool = False
    left_out: tuple[str, ...] = ()
    ahead: list[int] = field(default_factory=list)
    long_beyond: int | None = None
    long_numbers: fx.Node | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def output_node(self) -> fx.Node:
        return next(node for node in reversed(self.graph.nodes) if node.op == "output")

    def tokens(self) -> list[Input]:
        return [given for given in self.inputs if given.place == "tokens"]

    def bound(self, tokens: int) -> None:
        """Requests of more ``tokens`` than this are not served."""
        self.ends.append(tokens)

    @property
    def max_tokens(self) -> int | None:
        """The longest request that it is for; None if any is."""
        return min(self.ends, default=None)

    def tensors(self) -> Iterator[fx.Node]:
        return (node for node in self.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor))

    def refuse(self, node: fx.Node, reason: str, ahead: int | None = None) -> None:
        self.refusals.append(
            Refusal(
                node=node.name,
                operator=str(node.target),
                reason=reason,
                source_line=source_line(node),
                module=module_path(node),
                ahead=ahead,
            )
        )


def arguments_of(node: fx.Node) -> list[Any]:
    """Of a kind that the operator tells, which types do not."""
    return list(node.args)


def is_lost(traced: TracedGraph, node: fx.Node) -> bool:
    """Whether it is a constant without values: what tracing did not follow, and took for a tensor from outside, as what
    is computed under `vmap`."""
    value = getattr(traced.module, str(node.target)) if node.op == "get_attr" else None
    under_vmap = isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)
    return isinstance(value, FakeTensor) or under_vmap


def is_mutable(node: fx.Node) -> bool:
    """Whether the node's operator changes one of its inputs in place."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
