"""Which node of a flat graph has the host read what the device computes, or wait for it: such a step is no CUDA graph.

While a step is captured nothing is computed, so that the host has nothing to wait for: CUDA ends the capture with an
error.  An analysis of the graph, so that nobody tries.  Not looked into: what Inductor makes of a node, and what a
weight's own class does in `torch.nn.functional.linear`, of which the capture tells.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.refusals import source_line

# Whose operators are known; what another library's does on the host, only that knows.
KNOWN = ("aten", "prim", "prims", "selective")
# The results are numbers of the host, or as long as the values say.
READING = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
# Of those that read, what no tag says; those of linear algebra look whether it went well.
UNTAGGED = frozenset(
    f"aten::{name}"
    for name in (
        *("is_nonzero", "nonzero_numpy", "combinations", "inverse", "cholesky", "_linalg_check_errors"),
        *("linalg_inv", "linalg_cholesky", "linalg_solve", "linalg_lu_factor", "linalg_ldl_factor", "linalg_lstsq"),
        *("linalg_svd", "_linalg_svd", "linalg_svdvals", "svd", "linalg_pinv", "pinverse", "linalg_matrix_rank"),
        *("linalg_eigh", "_linalg_eigh", "linalg_eigvalsh", "linalg_eig", "linalg_eigvals", "_linalg_eigvals"),
        *("multinomial", "_pack_padded_sequence"),
    )
)
POWERS = frozenset({"aten::linalg_matrix_power", "aten::matrix_power"})
INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
COPIES = frozenset({"aten::to", "aten::_to_copy", "aten::copy", "aten::copy_", "aten::cpu"})
# torch 2.11 to 2.13 have a kernel for bfloat16 there; elsewhere a loop over the groups, whose ends the host reads.
GROUPED_MAJORS = (9, 10)


def host_read(flat: FlatGraph) -> str | None:
    """The first node that has the host read the device, with its source line; None: there is none."""
    for node in flat.module.graph.nodes:
        if node.op == "call_function" and (reason := _reason(node, flat.device)):
            return f"{node.target} {reason}: {source_line(node)}"
    return None


def _reason(node: fx.Node, device: torch.device) -> str | None:
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "may read the device on the host"
    if not isinstance(target, torch._ops.OpOverload):  # Python: sizes, items of a tuple
        return None
    if target.namespace not in KNOWN:
        return "may read the device on the host"
    if target._schema.name in COPIES | INDEXING and _crosses(node):
        return "copies between the host's memory and the device"
    return "reads the device on the host" if _reads(node, target, device) else None


def _reads(node: fx.Node, target: torch._ops.OpOverload, device: torch.device) -> bool:
    name = target._schema.name
    if name in INDEXING:
        return any(_value(index).dtype in (torch.bool, torch.uint8) for index in _argument(node, 1) if index)
    if name == "aten::one_hot":
        return bool(_argument(node, 1, -1) == -1)
    if name == "aten::repeat_interleave":
        return not READING.isdisjoint(target.tags) and node.kwargs.get("output_size") is None
    if name == "aten::histc":  # of no given range, which is that of the values
        return bool(_argument(node, 2, 0) == _argument(node, 3, 0))
    if name in POWERS:  # below 0 of the inverse
        return bool(_argument(node, 1) < 0)
    if name == "aten::_grouped_mm":
        return _argument(node, 2) is not None and not has_grouped_launch(node, device)
    return name in UNTAGGED or not READING.isdisjoint(target.tags)


def _argument(node: fx.Node, place: int, default: Any = None) -> Any:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    name = target._schema.arguments[place].name
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def has_grouped_launch(node: fx.Node, device: torch.device) -> bool:
    """Whether a product of rows in groups is one launch of a library's there, of these dtypes."""
    if node.target is not torch.ops.aten._grouped_mm.default:
        return False
    if device.type != "cuda" or torch.version.hip:
        return False
    both = {_value(operand).dtype for operand in node.args[:2] if isinstance(operand, fx.Node)}
    return both == {torch.bfloat16} and torch.cuda.get_device_capability(device)[0] in GROUPED_MAJORS


def _crosses(node: fx.Node) -> bool:
    """From the device, or to it from memory that is not pinned, as of what the host computes: both are waited for. An
    index on the host is copied, too."""
    values = [_value(given) for given in (node, *node.all_input_nodes)]
    return len({value.device.type == "cpu" for value in values if isinstance(value, torch.Tensor)}) > 1
