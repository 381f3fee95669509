"""What has the host read the device is named, so that nobody tries to capture it; what does not is let through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from selective_compile.options import EngineConfig
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.flatten import flatten
from selective_compile.passes.host_reads import POWERS, UNTAGGED, host_read
from selective_compile.step_program import why_not_captured
from tests.passes.graphs import analysed

aten = torch.ops.aten
IDS, MASK = torch.arange(6), torch.arange(6) > 2
ROWS, EXPERTS, ENDS = torch.randn(6, 8), torch.randn(2, 8, 16), torch.tensor([2, 6], dtype=torch.int32)


@pytest.fixture(scope="module")
def foreign() -> Iterator[Any]:
    """An operator of another library."""
    library = torch.library.Library("of_another", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    yield torch.ops.of_another.twice.default
    library._destroy()


def flat_with(target: Any, *args: Any, **kwargs: Any) -> FlatGraph:
    """A flat graph in which something is called whose result nobody needs; tensors are constants of the graph."""
    flat = flatten(analysed(lambda x, w: x * w, torch.randn(8)), paged=False)
    graph = flat.module.graph

    def constant(value: Any) -> Any:
        if isinstance(value, list):
            return [constant(each) for each in value]
        if not isinstance(value, Tensor):
            return value
        name = f"_given_{len(graph.nodes)}"
        flat.module.register_buffer(name, value)
        node = graph.get_attr(name)
        node.meta["val"] = value
        return node

    with graph.inserting_before(next(node for node in graph.nodes if node.op == "output")):
        given = [constant(each) for each in args]
        node: fx.Node = graph.call_function(target, tuple(given), {key: constant(each) for key, each in kwargs.items()})
    node.meta["val"] = ROWS
    return flat


READING: dict[str, tuple[Any, ...]] = {
    "item": (aten.item.default, IDS),
    "a number": (aten._local_scalar_dense.default, IDS),
    "nonzero": (aten.nonzero.default, MASK),
    "unique": (aten._unique2.default, IDS),
    "booleans": (aten.index.Tensor, ROWS, [MASK]),
    "bytes": (aten.index.Tensor, ROWS, [None, torch.ones(8, dtype=torch.uint8)]),
    "put by booleans": (aten.index_put.default, ROWS, [MASK], ROWS),
    "repeats": (aten.repeat_interleave.Tensor, IDS),
    "classes of the values": (aten.one_hot.default, IDS),
    "a range of the values": (aten.histc.default, ROWS, 4),
    "an inverse": (aten.linalg_inv.default, torch.eye(3)),
    "a draw": (aten.multinomial.default, ROWS, 1),
    "a power below 0": (aten.linalg_matrix_power.default, torch.eye(3), -1),
    "packed lengths": (aten._pack_padded_sequence.default, ROWS[None], torch.tensor([6]), True),
    "groups": (aten._grouped_mm.default, ROWS, EXPERTS, ENDS),
}
SILENT: dict[str, tuple[Any, ...]] = {
    "indices": (aten.index.Tensor, ROWS, [None, IDS]),
    "put by indices": (aten.index_put.default, ROWS, [IDS], ROWS),
    "repeats of one number": (aten.repeat_interleave.self_int, IDS, 2),
    "a number of classes": (aten.one_hot.default, IDS, 6),
    "a range": (aten.histc.default, ROWS, 4, 0, 3),
    "as many as there are": (aten._grouped_mm.default, EXPERTS, EXPERTS.transpose(1, 2)),
    "a power": (aten.linalg_matrix_power.default, torch.eye(3), 2),
    "a copy where it is": (aten._to_copy.default, ROWS),
    "one of ours": (torch.ops.selective.linear.default, ROWS, torch.randn(4, 8), None),
}


@pytest.mark.parametrize("name", READING)
def test_what_reads_the_device_is_named_with_its_operator(name: str) -> None:
    target, *args = READING[name]
    assert str(host_read(flat_with(target, *args))).startswith(f"{target} reads the device on the host: ")


@pytest.mark.parametrize(
    "name",
    [
        *("linalg_svd", "_linalg_svd", "linalg_svdvals", "svd", "linalg_pinv", "pinverse", "linalg_matrix_rank"),
        *("linalg_eigh", "_linalg_eigh", "linalg_eigvalsh", "linalg_eig", "linalg_eigvals", "_linalg_eigvals"),
    ],
)
def test_linear_algebra_looks_whether_it_went_well(name: str) -> None:
    assert " reads the device on the host: " in str(host_read(flat_with(getattr(aten, name).default, torch.eye(3))))


def test_least_squares_look_at_the_rank() -> None:
    assert host_read(flat_with(aten.linalg_lstsq.default, torch.eye(3), torch.eye(3)))


def test_each_name_is_that_of_an_operator() -> None:
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    gone = {"aten::cholesky"}  # since torch 2.14
    assert UNTAGGED | POWERS <= names | gone


@pytest.mark.parametrize("name", SILENT)
def test_what_reads_nothing_is_let_through(name: str) -> None:
    target, *args = SILENT[name]
    assert host_read(flat_with(target, *args)) is None


def test_repeats_of_a_known_length_are_let_through() -> None:
    assert host_read(flat_with(aten.repeat_interleave.Tensor, IDS, output_size=15)) is None


def test_what_another_library_does_nobody_knows(foreign: Any) -> None:
    assert str(host_read(flat_with(foreign, ROWS))).startswith("of_another.twice.default may read the device")
    assert "cond may read" in str(host_read(flat_with(torch.ops.higher_order.cond, MASK, None, None, [])))


@pytest.mark.parametrize(
    ("major", "dtype", "reads"),
    [(8, torch.bfloat16, True), (9, torch.bfloat16, False), (10, torch.bfloat16, False), (12, torch.bfloat16, True)]
    + [(9, torch.float16, True), (9, torch.float32, True)],
)
def test_a_gpu_has_a_kernel_for_groups_of_some_dtypes(
    major: int, dtype: torch.dtype, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlatGraph, "device", property(lambda flat: torch.device("cuda")))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    flat = flat_with(aten._grouped_mm.default, ROWS.to(dtype), EXPERTS.to(dtype), ENDS)
    assert bool(host_read(flat)) == reads
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert host_read(flat)


def test_the_reference_reads_lengths_on_the_host_but_stands_for_kernels_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flat, config = flat_with(aten._to_copy.default, ROWS), EngineConfig(implementation="reference")
    assert why_not_captured(flat, config) is None
    monkeypatch.setattr(FlatGraph, "device", property(lambda flat: torch.device("cuda")))
    assert "implementation='reference'" in str(why_not_captured(flat, config))
    assert why_not_captured(flat, EngineConfig()) is None


def test_what_is_copied_between_the_host_and_the_device_is_waited_for() -> None:
    """As frequencies that a model computes on the CPU in each forward; not what stays where it is."""
    flat = flat_with(aten._to_copy.default, ROWS, device=torch.device("cpu"))
    (copy,) = (node for node in flat.module.graph.nodes if node.target is aten._to_copy.default)
    (source,) = copy.all_input_nodes
    elsewhere = torch.empty_like(ROWS, device="meta")  # another device
    for given, result, waits in ((ROWS, ROWS, False), (elsewhere, ROWS, True), (ROWS, elsewhere, True)):
        source.meta["val"], copy.meta["val"] = given, result
        assert ("copies between the host" in str(host_read(flat))) is waits
    source.meta["val"] = elsewhere
    assert host_read(flat) is None
