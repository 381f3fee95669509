"""A flat graph made callable: through Inductor, or as it is."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._inductor import config, lowering
from torch._inductor.compile_fx import compile_fx
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.exc import InvalidCxxCompiler

from selective_compile import beforehand
from selective_compile.isolated_op import isolated_rows
from selective_compile.layered import Layered
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.layer_cut import cut

aten = torch.ops.aten
logger = logging.getLogger(__name__)
# What is not pointwise and is never run as it is: data movement, sums, and products, which are given their outputs.
SURE = frozenset(
    {
        *(aten.reshape.default, aten.view.default, aten.expand.default, aten.permute.default, aten.clone.default),
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int),
        *(aten.split.Tensor, aten.split_with_sizes.default, aten.cat.default, aten.sym_size.int, aten.copy_.default),
        *(aten.embedding.default, aten.index.Tensor, aten.full.default, torch.ops.prims.iota.default),
        *(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.var_mean.correction),
        *(aten.mm.default, aten.addmm.default),
    }
)


def compiled(
    flat: FlatGraph, *, inductor: bool, inputs_are_checked: bool = False, layers_once: bool = False
) -> Callable[..., Any]:
    """A function of the flat graph's inputs that returns the tuple of its outputs.

    Args:
        inputs_are_checked: the caller sees to it that inputs have the sizes and strides of the example inputs.
        layers_once: layers that are alike are compiled once and called one after the other, which takes the host a
            little longer in each step.
    """
    if not inductor or not can_compile(flat.device):
        return flat.module.forward
    pieces = cut(flat) if layers_once else None
    if pieces is None:
        run = through_inductor(flat, flat.module, flat.example_inputs, inputs_are_checked=inputs_are_checked)
    else:
        run = Layered(
            flat,
            pieces,
            lambda part, given: through_inductor(flat, part.module, given, inputs_are_checked=inputs_are_checked),
        )
    give_back_memory()
    return run


def through_inductor(
    flat: FlatGraph, module: fx.GraphModule, examples: Sequence[Any], *, inputs_are_checked: bool
) -> Callable[..., Any]:
    """``module``, which is that of a flat graph or a part of it, compiled."""
    passes: dict[str, Any] = {}
    if inputs_are_checked and config.post_grad_custom_post_pass is None:  # or it is the user's
        passes["post_grad_custom_post_pass"] = UncheckedStrides()
    settings = beforehand.answers(flat.device)
    settings |= {"size_asserts": config.size_asserts, "alignment_asserts": config.alignment_asserts}
    # Inductor finds code again that it made for vectors of another length, from a cache folder that processors share,
    # and compiles it for its own, which leaves out every other part of a row; by this it tells the two apart.
    if config.cpp.simdlen is None and flat.device.type == "cpu":
        with config.patch(settings):
            settings["cpp.simdlen"] = pick_vec_isa().bit_width()
    # With wrappers in other languages `compile_fx` asks for values that placeholders of ours do not have; and native
    # calls and captured graphs take the place of any wrapper.
    settings |= {"cpp_wrapper": False, "fx_wrapper": False}
    # A context of our own: the caller may be inside Dynamo's, whose fake tensors must not meet ours.
    with config.patch(**passes, **settings), tracing(TracingContext(flat.symbols.mode)), torch.no_grad():
        return compile_fx(module, list(examples))  # type: ignore[return-value]


def give_back_memory() -> None:
    """Return pages that compiling has left free to the system, where the allocator can be asked to: 35 MB of 160 for a
    Llama of 12 layers, which it would hold on to beside the weights and the pools of keys and values."""
    gc.collect()  # traced graphs hold on to each other
    give_back_free_pages()


def give_back_free_pages() -> None:
    """As `give_back_memory`, of what is free already."""
    with contextlib.suppress(OSError, AttributeError):  # it is glibc's
        ctypes.CDLL(None).malloc_trim(0)


def compiled_as_it_came(module: fx.GraphModule, examples: Sequence[Any], *, inductor: bool) -> Callable[..., Any]:
    """Dynamo's own graph through Inductor, unchanged."""
    devices = {example.device for example in examples if isinstance(example, Tensor)}
    if not inductor or not all(map(can_compile, devices)):
        return module.forward
    return compile_fx(module, list(examples))  # type: ignore[return-value]


def can_compile(device: torch.device) -> bool:
    """Whether Inductor has what it needs, which on a CPU is a C++ compiler; what it misses is logged."""
    if device.type != "cpu":
        return True
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        logger.warning("the rewritten graph runs as it is, slowly, and not through Inductor: %s", error)
        return False
    return True


class UncheckedStrides(CustomGraphPass):
    """Leaves out the checks of sizes, strides and alignment that Inductor puts before each use of a tensor not its own,
    where nothing needs them: 0.15 ms of a step of 6 layers. The graph stays as it is.

    They hold inputs to the examples, and what an operator that Inductor runs as it is gives to what its fake said:
    where those differ, which happens, the code would read other elements. Of our own operators the tests compare the
    two, and they give fresh tensors. So the checks go where Inductor makes code for all operators but those.
    """

    def __call__(self, graph: fx.Graph) -> None:
        if all(not node.op.startswith("call_") or is_generated(node) for node in graph.nodes):
            ask_for_sizes(graph)
            config.size_asserts = config.alignment_asserts = False  # until the end of `compiled`

    def uuid(self) -> bytes:
        """For Inductor's cache of compiled graphs: another rule gives another graph."""
        return get_hash_for_files((__file__,))


def ask_for_sizes(graph: fx.Graph) -> None:
    """Have Inductor name each size that is not known before: from torch 2.14 on it takes them from nodes that ask for
    them, or else from the checks of inputs alone."""
    inputs = [node for node in graph.nodes if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor)]
    named = set()
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        for node in inputs:
            for dim, size in enumerate(node.meta["val"].shape):
                if isinstance(size, torch.SymInt) and size.node.expr not in named:
                    named.add(size.node.expr)
                    graph.call_function(torch.ops.aten.sym_size.int, (node, dim)).meta["val"] = size


def is_generated(node: fx.Node) -> bool:
    """Whether Inductor makes code for an operator in any case, or it is ours, so that strides are as the graph says."""
    # Ours that write to a pool are wrapped in another one at this point.
    target = node.args[0] if node.target is auto_functionalized_v2 else node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", None) == operator.getitem.__module__  # of sizes
    if target.namespace == "selective":
        return target is not isolated_rows  # which gives what somebody else's module does
    # Others in these may be left to PyTorch in the end, as sorting is on a CPU.
    sure = torch.Tag.pointwise in target.tags or target in SURE
    return sure and target in lowering.lowerings and target not in lowering.fallbacks
