"""Part of pass 1: of a truth value that nothing uses, nothing is left; what can fail stays."""

from __future__ import annotations

import operator

import torch
from torch import fx

from selective_compile.passes.truth_ranges import drop_truth_ranges

ASSERT = torch.ops.aten._assert_scalar.default


def graph_of(*assertions: tuple[object, int]) -> fx.GraphModule:
    """Asserts these of whether all of the input is true."""
    graph = fx.Graph()
    truth = graph.call_method("item", (graph.call_method("all", (graph.placeholder("x"),)),))
    number = graph.call_function(torch.sym_ite, (truth, 1, 0))
    for compare, bound in assertions:
        graph.call_function(ASSERT, (graph.call_function(compare, (number, bound)), "it is out of range"))  # type: ignore[arg-type]
    graph.output(())
    return fx.GraphModule({}, graph)


def test_what_cannot_fail_is_not_asserted() -> None:
    module = graph_of((operator.ge, 0), (operator.le, 1))
    assert drop_truth_ranges(module) == 2
    assert not [node for node in module.graph.nodes if node.target is ASSERT]
    assert drop_truth_ranges(module) == 0


def test_what_is_written_in_place_stays() -> None:
    module = graph_of((operator.ge, 0))
    (x,) = module.graph.find_nodes(op="placeholder")
    with module.graph.inserting_before(x.next):
        module.graph.call_method("zero_", (x,))
    drop_truth_ranges(module)
    assert "zero_" in {node.target for node in module.graph.nodes}


def test_what_can_fail_stays() -> None:
    module = graph_of((operator.ge, 1), (operator.le, 1))
    assert drop_truth_ranges(module) == 1
    assert [node.args[0].args[1] for node in module.graph.nodes if node.target is ASSERT] == [1]
    module.graph.lint()
