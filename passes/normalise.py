"""Pass 1: Dynamo's graph brought to one functional ATen graph in which attention is still one node.

Before::  view_4 = linear_8.view((s33, s50, -1, 16));  key_1 = ....scaled_dot_product_attention(...)
After::   aten.view.default(linear_8, [B, S, -1, 16]);  aten.scaled_dot_product_attention.default(...)

The trace runs in a shape environment of our own with two symbols, one for the batch and one for the tokens of a
request: whatever Dynamo called the sizes of the token inputs is brought to these two.  Declines (`RefusedError`) when
an input is neither a weight nor a ``[B, S]`` token input, as a Hugging Face cache is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from selective_compile.passes.axes import Sizes, is_symbolic
from selective_compile.passes.functional import make_functional
from selective_compile.passes.late_lookups import look_up_late
from selective_compile.passes.lengths import bounds_requests, ends_of
from selective_compile.passes.nan_guards import fold_nan_guards
from selective_compile.passes.packed_trace import Traces
from selective_compile.passes.refusals import Refusal, RefusedError, module_path, source_line
from selective_compile.passes.retrace import retraced
from selective_compile.passes.spellings import SPELT_OUT
from selective_compile.passes.strides import answer_without_guards
from selective_compile.passes.traced_graph import OF_MODULE, OF_NUMPY, Input, Place, TracedGraph
from selective_compile.passes.truth_ranges import drop_truth_ranges
from selective_compile.passes.written_softmax import fold_softmaxes

aten = torch.ops.aten
SOURCE = "selective_source"
OTHER_NAMES: dict[Any, Any] = dict.fromkeys((aten.concat.default, aten.concatenate.default), aten.cat.default)
# What `tensor.data` is to Dynamo: tracing, which sees operators alone, would take what it gives for a constant.
DATA: Any = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]


def source_name(placeholder: fx.Node) -> str:
    """Dynamo's name for where a placeholder's value comes from (torch 2.11 has a method where 2.13 has a property)."""
    if SOURCE in placeholder.meta:
        return placeholder.meta[SOURCE]
    argument = placeholder.meta.get("grapharg")
    source = argument.source if argument is not None else placeholder.meta.get("_dynamo_source")
    if source is None:
        return placeholder.name
    return source.name() if callable(source.name) else source.name


def keep_sources(module: fx.GraphModule) -> None:
    """Write each placeholder's source into its meta: Dynamo drops its own record of it once the backend returns."""
    for node in module.graph.nodes:
        if node.op == "placeholder":
            node.meta[SOURCE] = source_name(node)


def place_of(placeholder: fx.Node) -> Place:
    """Whether a placeholder of Dynamo's graph is a weight, token ids (or a mask or positions over them), or a size."""
    value = placeholder.meta["example_value"]
    if is_symbolic(value) or isinstance(value, int):
        return "size"
    if is_float_input(placeholder):
        return "other"
    name = source_name(placeholder)
    if "_parameters[" in name or "_buffers[" in name or isinstance(value, torch.nn.Parameter):
        return "weight"
    if OF_MODULE.match(name) and not any(map(is_symbolic, value.shape)):
        return "weight"
    if value.dim() == 2 and not value.dtype.is_floating_point:
        return "tokens"
    if value.dim() == 3 and value.dtype.is_floating_point:
        return "tokens"
    return "other" if any(isinstance(size, torch.SymInt) for size in value.shape) or value.dim() > 1 else "weight"


def is_float_input(placeholder: fx.Node) -> bool:
    """Whether Dynamo passes a Python float through this input, as a tensor that it reads at once; one of numpy stays a
    tensor."""
    is_read = isinstance(getattr(placeholder.meta["example_value"], "item_memo", None), torch.SymFloat)
    return is_read and not source_name(placeholder).startswith(OF_NUMPY)


class Symbols:
    """The two symbolic sizes of a trace and the fake inputs made of them."""

    def __init__(self, env: ShapeEnv | None = None) -> None:
        self.env = env or ShapeEnv()
        answer_without_guards(self.env)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self._made: dict[str, torch.SymInt] = {}

    def size(self, name: str, hint: int) -> torch.SymInt:
        if name not in self._made:
            source = ConstantSource(name)
            symbol = self.env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
            made: Any = self.env.create_symintnode(symbol, hint=hint, source=source)
            self._made[name] = made
        return self._made[name]

    def sizes(self, limit: int | None = None) -> Sizes:
        """The symbols, of a graph for up to ``limit`` tokens."""
        batch, token = self._made.get("batch"), self._made["token"].node.expr
        return Sizes(batch=None if batch is None else batch.node.expr, token=token, limit=limit)


def normalise(module: fx.GraphModule, examples: Sequence[Any], traces: Traces | None = None) -> TracedGraph:
    """Retrace Dynamo's ``module`` called with ``examples`` (weights real, sizes SymInt).  Raises `RefusedError`.

    ``traces``: as in `retraced`.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    places = [place_of(node) for node in placeholders]
    refused = [refused_input(node) for node, place in zip(placeholders, places, strict=True) if place == "other"]
    refused += [refused_input(node) for node in foreign_sizes(placeholders)]
    refused += [in_another_type(node) for node in module.graph.nodes if enters_autocast(node)]
    refused += mismatched([node for node, place in zip(placeholders, places, strict=True) if place == "tokens"])
    if refused:
        raise RefusedError(refused)
    symbols = Symbols()
    with symbols.mode:
        names = size_names(placeholders)
        fakes = [fake_input(symbols, names, node, place) for node, place in zip(placeholders, places, strict=True)]
    traced = retrace(module, symbols, fakes, traces)
    refuse_constants(symbols)
    inputs = [
        Input(index=index, node=node, source=source_name(old), place=place, example=example)
        for index, (node, old, place, example) in enumerate(
            zip((n for n in traced.graph.nodes if n.op == "placeholder"), placeholders, places, examples, strict=True)
        )
    ]
    make_functional(traced)  # before copies are removed: a copy may be there to be written to
    tidy(traced)
    fold_softmaxes(traced)
    fold_nan_guards(traced)
    look_up_late(traced, symbols.mode)
    ends = ends_of(bounding(symbols))
    return TracedGraph(
        module=traced,
        inputs=inputs,
        sizes=symbols.sizes(min(ends, default=None)),
        narrowings=narrowings(symbols),
        ends=list(ends),
        conditions=tuple(guard.expr for guard in symbols.env.guards),
    )


def enters_autocast(node: fx.Node) -> bool:
    """Whether what follows is computed in a type that `torch.autocast` chooses, which tracing does not write down."""
    return node.target is _enter_autocast and bool(node.args[2])


def in_another_type(node: fx.Node) -> Refusal:
    name = node.name
    while node.op != "output" and not node.meta.get("stack_trace"):  # the first operator in it knows where it stands
        node = node.next
    return Refusal(
        node=name,
        operator="autocast",
        reason="it is not known what it casts for this operator",
        source_line=source_line(node),
        module=module_path(node),
    )


def refuse_constants(symbols: Symbols) -> None:
    """Raises `RefusedError` where the trace holds for one number of tokens or requests alone, as an unrolled loop does:
    no dimension of such a graph can be told from one of that size by chance."""
    if all(size is None or size.free_symbols for size in (symbols.sizes().batch, symbols.sizes().token)):
        return
    guard = next(guard for guard in symbols.env.guards if isinstance(guard.expr, sympy.Eq))
    raise RefusedError([narrowed(guard)])


def narrowings(symbols: Symbols) -> list[Refusal]:
    """Where the trace asked what a size is, so that it holds for some sizes only, and does not only bound requests."""
    bounds = bounding(symbols)
    return [narrowed(guard) for guard in symbols.env.guards if guard.expr not in bounds]


def narrowed(guard: Any) -> Refusal:
    return Refusal(
        node="sizes",
        operator="number of tokens or requests",
        reason=f"it is used as a number; the graph would hold only where {guard.expr}",
        source_line=str(guard.sloc.maybe_user_loc or guard.sloc),
        module="",
    )


def bounding(symbols: Symbols) -> list[Any]:
    """The conditions that are on the number of tokens alone, and do no more than bound requests."""
    tokens = {symbols.sizes().token}
    conditions = [guard.expr for guard in symbols.env.guards]
    return [condition for condition in conditions if condition.free_symbols == tokens and bounds_requests(condition)]


def retrace(
    module: fx.GraphModule, symbols: Symbols, fakes: Sequence[Any], traces: Traces | None = None
) -> fx.GraphModule:
    """``module`` traced once more to ATen with ``fakes``, keeping stack traces and composite operators.

    In ``module`` itself `detach` stands then for what tracing would not follow.
    """
    for node in module.graph.nodes:
        if node.target is DATA:
            node.target = torch.detach
    drop_truth_ranges(module)
    try:
        return retraced(module, fakes, SPELT_OUT, symbols.mode, traces)
    except RuntimeError as error:  # an operator finds that symbolic sizes do not fit
        reason = f"it cannot be traced with symbolic sizes: {str(error).strip().splitlines()[0]}"
        refusal = Refusal(node="graph", operator="trace", reason=reason, source_line="source line unknown", module="")
        raise RefusedError([refusal]) from error


def fake_input(symbols: Symbols, names: dict[str, str], node: fx.Node, place: Place) -> Any:
    value = node.meta["example_value"]
    if place == "size":  # Dynamo passes each symbolic size as an input of its own
        name = names.get(str(value.node.expr)) if is_symbolic(value) else None
        return symbols.size(name, hint_of(value)) if name is not None else hint_of(value)
    if place == "weight":
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    shape = [
        symbols.size(name, hint_of(size)) if isinstance(size, torch.SymInt) else size
        for name, size in zip(("batch", "token"), value.shape, strict=False)
    ]
    return torch.empty([*shape, *value.shape[2:]], dtype=value.dtype, device=value.device)


def size_names(placeholders: Sequence[fx.Node]) -> dict[str, str]:
    """Dynamo's symbols for the first two sizes of each token input, by the name they have here."""
    found: dict[str, str] = {}
    for node in placeholders:
        if place_of(node) == "tokens":
            for name, size in zip(("batch", "token"), node.meta["example_value"].shape, strict=False):
                if isinstance(size, torch.SymInt):
                    found.setdefault(str(size.node.expr), name)
    return found


def foreign_sizes(placeholders: Sequence[fx.Node]) -> list[fx.Node]:
    """Numbers that the model reads, that may be others in the next call, and that are no size of its token inputs.

    Dynamo also lists the strides of inputs that are parts of larger tensors, which nothing reads.
    """
    names = size_names(placeholders)
    given = [node for node in placeholders if is_symbolic(node.meta["example_value"]) and node.users]
    return [node for node in given if str(node.meta["example_value"].node.expr) not in names]


def hint_of(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def is_unbacked(size: Any) -> bool:
    """Whether nothing tells which other sizes it equals."""
    return not isinstance(size, int) and size.node.hint is None


def mismatched(tokens: list[fx.Node]) -> list[Refusal]:
    """Token inputs whose sizes are not the common ``[B, S]`` with S symbolic (B may be the constant 1)."""
    if not tokens:  # such as a piece of a model that Dynamo broke into several graphs
        reason, line = "none of the graph's inputs holds tokens", "source line unknown"
        return [Refusal(node="inputs", operator="inputs", reason=reason, source_line=line, module="")]
    odd = [node for node in tokens if any(map(is_symbolic, node.meta["example_value"].shape[2:]))]
    odd = odd or [node for node in tokens if any(map(is_unbacked, node.meta["example_value"].shape[:2]))]
    if odd:  # such as the kept rows of a cache
        return [refused_input(node) for node in odd]
    shapes = {tuple(hint_of(size) for size in node.meta["example_value"].shape[:2]) for node in tokens}
    lengths = {length for _, length in shapes}
    batches = {batch for batch, _ in shapes if batch != 1}
    if len(lengths) != 1 or len(batches) > 1:
        return [refused_input(node) for node in tokens]
    return [node_refusal for node in tokens if (node_refusal := constant_size(node)) is not None]


def constant_size(node: fx.Node) -> Refusal | None:
    batch, length = node.meta["example_value"].shape[:2]
    if isinstance(length, torch.SymInt) and (isinstance(batch, torch.SymInt) or batch == 1):
        return None
    return refused_input(node, "must have a batch and a number of tokens that the model does not turn into constants")


KNOWN_INPUTS = "must be a weight or a [batch, tokens] input of one common size"


def refused_input(node: fx.Node, must: str = KNOWN_INPUTS) -> Refusal:
    shape = list(getattr(node.meta["example_value"], "shape", ()))
    return Refusal(
        node=node.name,
        operator="graph input",
        reason=f"{must}, got shape {shape} (caches of Hugging Face are not rewritten)",
        source_line=source_name(node),
        module="",
    )


def tidy(module: fx.GraphModule) -> int:
    """Remove nodes that change nothing (aliases, full slices, casts to the same type); returns how many."""
    removed = 0
    for node in list(module.graph.nodes):
        if node.target in OTHER_NAMES:
            node.target = OTHER_NAMES[node.target]
        if node.target is aten.cat.default:
            drop_empty_parts(node)
        if node.op == "call_function" and changes_nothing(node):
            source = node.args[0]
            node.replace_all_uses_with(source[0] if isinstance(source, list) else source)
            module.graph.erase_node(node)
            removed += 1
        elif node.target is aten.view.default:
            node.target = aten.reshape.default  # a copy that was removed may have been what made the view legal
    module.graph.eliminate_dead_code()
    module.recompile()
    return removed


def drop_empty_parts(node: fx.Node) -> None:
    """Hugging Face creates a cache as ``tensor([])`` and concatenates the first keys to it; Meta's Llama puts as many
    zeros in front of its mask as tokens were there before."""
    given, dim = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    shapes = {part: list(part.meta["val"].shape) for part in given}  # type: ignore[union-attr]
    parts = [part for part in given if shapes[part] != [0] and not is_zero(shapes[part][dim])]  # type: ignore
    node.args = (parts or given, *node.args[1:])


def is_zero(size: Any) -> bool:
    return isinstance(size, int) and size == 0


def changes_nothing(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    if packet in (aten.alias, aten.detach_, aten.detach, aten.lift_fresh_copy):
        return True
    if packet is aten.dropout:
        return not node.args[2]
    if packet is aten.cat:
        return len(node.args[0]) == 1  # type: ignore[arg-type]
    source = node.args[0] if node.args else None
    before, after = source.meta.get("val") if isinstance(source, fx.Node) else None, node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    same = before.dtype == after.dtype and before.device == after.device and len(before.shape) == len(after.shape)
    if packet in (aten.to, aten.type_as, aten.contiguous, aten._to_copy, aten.clone):
        return same
    if packet is aten.slice:
        return same and str(before.shape) == str(after.shape)
    return False
