"""What autocast casts is written into the graph: the same numbers to the bit, and no autocast in it any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from selective_compile.passes.autocast_casts import write_casts

Function = Callable[[Tensor, Tensor], Tensor]
GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


W, BIAS, HEADS, MASK = drawn(8, 8), drawn(8), drawn(1, 2, 5, 8), drawn(5, 5)


def with_a_part_without(x: Tensor) -> Tensor:
    y = x @ W
    with torch.autocast("cpu", enabled=False):
        z = y.float() @ W
    return z @ W


def in_place(x: Tensor) -> Tensor:
    y = x @ W
    y.add_(x)
    return y


# Of x [2, 5, 8] in float32 and h, the same in 16 bits; and how many calls are changed.
CALLS: dict[str, tuple[Function, int]] = {
    "linear": (lambda x, h: F.linear(x, W, BIAS), 1),
    "linear of 16 bits": (lambda x, h: F.linear(h, W), 1),
    "product": (lambda x, h: x @ W, 1),
    "products": (lambda x, h: torch.baddbmm(MASK, x, x.mT), 1),
    "sdpa": (lambda x, h: F.scaled_dot_product_attention(HEADS + x.sum(), HEADS, HEADS, attn_mask=MASK), 1),
    "sdpa of other sizes": (lambda x, h: F.scaled_dot_product_attention(HEADS + x.sum(), HEADS, HEADS[..., :4]), 1),
    "sdpa of two types": (lambda x, h: F.scaled_dot_product_attention(x, x, h[..., :4], is_causal=True), 1),
    "einsum": (lambda x, h: torch.einsum("bsd,de->bse", x, W), 1),
    "einsum of two types": (lambda x, h: torch.einsum("bsd,bed->bse", h, x), 1),
    "tensordot": (lambda x, h: torch.tensordot(x, W, 1), 1),
    "convolution": (lambda x, h: F.conv1d(x.mT, torch.ones(8, 8, 2)), 1),
    "cat": (lambda x, h: torch.cat([x, h]), 1),
    "prod": (lambda x, h: h.prod(-1), 1),
    "softmax": (lambda x, h: h.softmax(-1), 0),
    "rms_norm": (lambda x, h: F.rms_norm(h, (8,)), 0),
    "sum of two types": (lambda x, h: x * h, 0),
    "cast of its own": (lambda x, h: (h.float() + 1).to(h.dtype), 0),
    "in place": (lambda x, h: in_place(x), 1),
    "a part without": (lambda x, h: with_a_part_without(x), 2),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_the_same_to_the_bit(name: str, dtype: torch.dtype) -> None:
    function, count = CALLS[name]
    found: list[int] = []

    def run(x: Tensor, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return function(x, h)

    def backend(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        found.append(write_casts(module))
        assert not {_enter_autocast, _exit_autocast} & {node.target for node in module.graph.nodes}
        return module.forward

    x = drawn(2, 5, 8)
    with torch.no_grad():
        expected = run(x.clone(), x.to(dtype))
        result = torch.compile(run, backend=backend, fullgraph=True)(x.clone(), x.to(dtype))
    assert result.dtype is expected.dtype and torch.equal(result, expected)
    assert found == [count]


def test_sizes_may_be_symbolic() -> None:
    """PyTorch has no rule for them without numbers under autocast, but for its dispatcher in Python."""
    found: list[int] = []

    @torch.autocast("cpu", torch.bfloat16)
    def run(x: Tensor) -> Tensor:
        return torch.zeros(1, 1, 1).baddbmm(batch1=x, batch2=x.mT, beta=1.0, alpha=0.5)

    def backend(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        found.append(write_casts(module))
        return module.forward

    x = drawn(2, 5, 8)
    torch._dynamo.mark_dynamic(x, 1)
    with torch.no_grad():
        assert torch.equal(torch.compile(run, backend=backend, fullgraph=True)(x), run(x))
    assert found == [1]


def graph_under(device: str, call: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]) -> tuple[fx.GraphModule, fx.Node]:
    """``call`` under autocast, of x [2, 8, 8] in float32 and h in bfloat16 on a device that may not be there."""
    graph = fx.Graph()
    with FakeTensorMode():
        values = [torch.empty(2, 8, 8, device=device, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    given = [graph.placeholder(name) for name in "xh"]
    for node, value in zip(given, values, strict=True):
        node.meta["example_value"] = value
    begun = graph.call_function(_enter_autocast, (device, torch.bfloat16, True, True))
    result = call(graph, *given)
    graph.call_function(_exit_autocast, (begun,))
    graph.output(result)
    return fx.GraphModule({}, graph), result


ON_A_GPU = {
    "softmax": ("softmax", (-1,), "dtype"),
    "sum": ("sum", (-1,), "dtype"),
    "pow": ("pow", (2,), "x"),
    "matmul": ("matmul", (), "x"),
    "abs": ("abs", (), ""),
}


@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_gpu_computes_more_in_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *args, **kwargs: True)
    method, more, changed = ON_A_GPU[name]

    def call(graph: fx.Graph, x: fx.Node, h: fx.Node) -> fx.Node:
        operands = (x, x) if method == "matmul" else (h, *more)
        return graph.call_method(method, operands)

    module, result = graph_under("cuda", call)
    assert write_casts(module) == bool(changed)
    casts = [node for node in module.graph.nodes if node.op == "call_method" and node.target == "to"]
    if changed == "x":
        wanted = torch.bfloat16 if method == "matmul" else torch.float32
        assert casts and {node.args[1] for node in casts} == {wanted} and set(result.all_input_nodes) == set(casts)
    else:
        assert not casts and dict(result.kwargs) == ({"dtype": torch.float32} if changed else {})


def product_beside_what_it_was_made_of(x: Tensor) -> Tensor:
    return x @ x.mT.to(x.dtype) @ x + x


def test_what_reads_a_value_in_both_types_keeps_its_autocast() -> None:
    module, result = graph_under(
        "cpu", lambda graph, x, h: graph.call_function(product_beside_what_it_was_made_of, (x,))
    )
    assert write_casts(module) == 0
    begun, call, ended = (node for node in module.graph.nodes if node.op == "call_function")
    assert (begun.target, ended.target, ended.args) == (_enter_autocast, _exit_autocast, (begun,))
    assert call is result and begun.args == ("cpu", torch.bfloat16, True, True)


def test_what_is_not_known_keeps_its_autocast() -> None:
    def call(graph: fx.Graph, x: fx.Node, h: fx.Node) -> fx.Node:
        del x.meta["example_value"]
        return graph.call_function(torch.matmul, (x, x))

    module, _ = graph_under("cpu", call)
    assert write_casts(module) == 0
    assert _enter_autocast in {node.target for node in module.graph.nodes}


def test_calls_alike_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from selective_compile.passes import autocast_casts

    tried: list[str] = []
    casts_of = autocast_casts.casts_of

    def noted(node: fx.Node, *args: Any) -> Any:
        tried.append(node.name)
        return casts_of(node, *args)

    monkeypatch.setattr(autocast_casts, "casts_of", noted)

    def layers(graph: fx.Graph, x: fx.Node, h: fx.Node) -> fx.Node:
        results = [graph.call_function(torch.matmul, (x, x)) for _ in range(3)]
        return results[-1]

    module, _ = graph_under("cpu", layers)
    assert (write_casts(module), len(tried)) == (3, 1)
