"""The decoder's graph as it goes through the passes, with what each pass has found."""

from __future__ import annotations

import copyreg
import math
import os.path
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from selective_compile.passes.axes import Axes, Sizes
from selective_compile.passes.isolated_call import IsolatedCall, WholeModules

Place = Literal["weight", "tokens", "size", "other"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the rows that our kernels take
# Where Dynamo finds an attribute of the module that is traced, or of one in it, or what a file has by a name; one of
# numpy's, as a tensor.
OF_NUMPY = "___from_numpy("
OF_MODULE = re.compile(rf"({re.escape(OF_NUMPY)})?(L\['(self|model)'\]\.|G\[)")
OWN_FOLDER = f'"{os.path.dirname(os.path.dirname(__file__))}{os.path.sep}'  # as a stack names files


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
class Refusal:
    """Something that could not be proved, with the place in the user's code it comes from.

    ``ahead``: the first position that was found to see a later one there; None if none was.
    """

    node: str
    operator: str
    reason: str
    source_line: str
    module: str
    ahead: int | None = None

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.operator} ({self.node}){where}: {self.reason}\n      {self.source_line}"


SHOWN = 8  # refusals of one text: a graph with a cache has some for every layer, and a log is read in a terminal


def listed(refusals: Sequence[Refusal]) -> list[str]:
    """The first ones as text, and how many there are beside them."""
    more = len(refusals) - SHOWN
    return [*map(str, refusals[:SHOWN]), *([f"and {more} more, which `refusals` has"] if more > 0 else [])]


class RefusedError(ValueError):
    """The model holds something that could not be proved; ``refusals`` names each node and its source line.

    ``note``: why it cannot run in another way either.
    """

    def __init__(self, refusals: Sequence[Refusal], note: str = "") -> None:
        self.refusals = tuple(refusals)
        text = "\n  ".join([*listed(self.refusals), note]).rstrip()
        super().__init__(f"{len(self.refusals)} operation(s) could not be proved safe to batch selectively:\n  {text}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Past `__init__`, which takes more than the message: a worker's refusal reaches the process that waits."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A query, key or value before head repetition: ``node`` with the dimension that enumerates tokens.

    Of the node's heads, which are ``every`` times ``heads``, the operand has the first of each ``every``.
    """

    node: fx.Node
    order: tuple[int, ...]  # permutation that brings the operand to (tokens, heads ..., head size)
    heads: int
    head_size: int
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class MaskTerm:
    """One mask of an attention call: a boolean to keep or drop, or floats to add, ``factor`` times, to the scores.

    Or numbers that scores are multiplied with ("times"): they must be 1 for every pair that is not hidden.  ``fill`` is
    what a hidden score is replaced by, before anything nearer the softmax is added to it.
    """

    node: fx.Node
    kind: Literal["keep", "drop", "add", "times"]
    factor: float = 1.0
    fill: float = -math.inf


@dataclass(frozen=True, kw_only=True)
class MaskFamily:
    """What a mask was proved to be: causal, and what else is not 0 or empty.

    Attributes:
        window: keys of the last ``window`` positions.
        chunk: keys of the query's own chunk, where every ``chunk`` positions are one.
        prefix: keys of the first ``prefix`` positions are seen by queries in front of them too.
        slopes: for each query head, what is added to a score per position that the key is behind (ALiBi), negated.
        padding: the [B, S] graph input whose zeros hide keys.
        narrowed: the window is not the model's, but was asked for.
    """

    window: int
    padding: fx.Node | None
    chunk: int = 0
    prefix: int = 0
    slopes: tuple[float, ...] = ()
    narrowed: bool = False

    def __str__(self) -> str:
        named = [
            "causal",
            f"window {self.window}{' by max_attention_window' if self.narrowed else ''}" if self.window else "",
            f"chunks of {self.chunk}" if self.chunk else "",
            f"prefix {self.prefix}" if self.prefix else "",
            f"a linear bias for each of {len(self.slopes)} heads" if self.slopes else "",
            "keys hidden by the attention mask" if self.padding is not None else "",
        ]
        return ", ".join(filter(None, named))


@dataclass(frozen=True, kw_only=True)
class KeyMarks:
    """A (query, key) tensor that holds ``marked`` at the keys that were selected for the query, else ``unmarked``."""

    node: fx.Node
    marked: bool | int | float
    unmarked: bool | int | float


@dataclass(kw_only=True)
class KeySelection:
    """For each query, the ``count`` keys with the highest scores, or all if there are no more.

    The score is the sum over heads of ``weights * relu(scale * query . key)``; ``masks`` say which keys there are, and
    ``marks`` is what the selection is read by.  ``output`` is the node that selects.
    """

    name: str
    output: fx.Node
    query: Operand
    key: Operand
    weights: Operand  # with a head size of 1
    scale: float
    count: int
    masks: tuple[MaskTerm, ...]
    marks: tuple[KeyMarks, ...]
    source_line: str
    covers: frozenset[fx.Node]
    causal_flag: Literal[False] = False
    family: MaskFamily | None = None

    def __str__(self) -> str:
        return f"the best {self.count} keys by {self.query.heads} heads of {self.key.head_size}"


@dataclass(frozen=True, kw_only=True)
class PerHead:
    """Of a weight [N, r], a matrix for each head: row i of head h is row ``first + h * step + i``, for i < ``size``."""

    weight: fx.Node
    first: int
    step: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Of the numbers of each token, ``size`` many from ``first`` on; ``operand`` has them as heads of size 1."""

    operand: Operand
    first: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Latent:
    """What keys and values are made of: ``rows``, one head of r numbers for each token.

    The columns from ``at`` on of head h's key are ``key[h] @ rows``, the others, in order, are ``shared`` by all heads;
    its value is ``value[h] @ rows``.
    """

    rows: Operand
    key: PerHead
    at: int
    value: PerHead
    shared: tuple[Columns, ...]

    @property
    def size(self) -> int:
        return self.rows.head_size

    @property
    def row_size(self) -> int:
        """Numbers that are kept of a token."""
        return self.size + sum(columns.size for columns in self.shared)


@dataclass(kw_only=True)
class AttentionCall:
    """One recognised attention: ``output`` is the node whose value the ragged op replaces."""

    name: str
    form: Literal["sdpa", "eager"]
    output: fx.Node
    output_order: tuple[int, ...]  # permutation of (tokens, heads ..., value size) into the output's dimensions
    query: Operand
    key: Operand
    value: Operand
    scale: float
    softcap: float
    causal_flag: bool
    masks: tuple[MaskTerm, ...]
    source_line: str
    covers: frozenset[fx.Node]
    sinks: fx.Node | None = None  # as many numbers as query heads, in their order
    family: MaskFamily | None = None
    selection: KeySelection | None = None  # of the keys that the family allows, only these
    latent: Latent | None = None  # kept in place of keys and values


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
    """Whether it is a constant without values: what tracing did not follow, and took for a tensor from outside."""
    return node.op == "get_attr" and isinstance(getattr(traced.module, str(node.target)), FakeTensor)


def is_mutable(node: fx.Node) -> bool:
    """Whether the node's operator changes one of its inputs in place."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def source_line(node: fx.Node) -> str:
    """``file:line code`` of the innermost user frame that made the node, or a note that it is unknown."""
    trace = node.meta.get("stack_trace") or ""
    frames = [line.strip() for line in trace.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(frames) if line.startswith("File ") and OWN_FOLDER not in line]
    if not starts:
        return "source line unknown"
    place = frames[starts[-1]].split('"')
    number = place[2].split(",")[1].replace("line", "").strip()
    code = frames[starts[-1] + 1] if starts[-1] + 1 < len(frames) else ""
    return f"{place[1]}:{number}  {code}"


def module_path(node: fx.Node) -> str:
    """Dotted path of the module that made the node, from the model's root."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    return shortened_path(str(next(reversed(stack.values()))[0]))


def shortened_path(path: str) -> str:
    """The path of a module from Dynamo's name for it: without what stands for the model, and for a dictionary."""
    # So named where a class has its own `__getattr__`, as wrappers of models have.
    path = re.sub(r"\.__dict__\['_modules'\]\['([^']*)'\]", r".\1", path)
    for root in ("L['self']", "L['model']"):
        path = path.replace(root + ".", "").replace(root, "")
    return path
