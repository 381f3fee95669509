"""Which graphs are compiled without checks of strides at each use: those of operators whose strides are sure."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from selective_compile import beforehand, compiling, ops
from selective_compile.compiling import UncheckedStrides
from selective_compile.isolated_op import isolated_rows
from selective_compile.options import EngineConfig
from selective_compile.programs import compile_step_program
from selective_compile.rewriting import captured_and_rewritten
from selective_compile.runtime.engine import Engine
from tests.decoders import Decoder
from tests.models import tiny
from tests.oracle import assert_same_tokens


def test_inductor_is_told_what_the_machine_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks anew otherwise, in processes of its own: a second of each start."""
    told: list[object] = []
    flat = captured_and_rewritten(tiny("llama", num_hidden_layers=1), {})[1].flat
    assert flat is not None
    monkeypatch.setattr(beforehand, "answers", lambda device: {"cpp.vec_isa_ok": True})
    monkeypatch.setattr(compiling, "compile_fx", lambda *_: told.append(config.cpp.vec_isa_ok))
    with config.patch({"cpp.vec_isa_ok": None}):
        compiling.through_inductor(flat, flat.module, [], inputs_are_checked=True)
    assert told == [True]


def generated(x: Tensor) -> Tensor:
    return ops.linear(x.sin() + 1, x)


def run_as_it_is(x: Tensor) -> Tensor:
    return torch.ops.aten.sort.stable(x, stable=True)[0] + 1


def of_somebodys_module(x: Tensor) -> Tensor:
    return isolated_rows([x], 0, 0, 0, "[('float32', ('S', 3))]")[0]


@pytest.mark.parametrize(
    ("function", "checked"), [(generated, False), (run_as_it_is, True), (of_somebodys_module, True)]
)
def test_what_is_checked(function: Callable[[Tensor], Tensor], checked: bool) -> None:
    graph = make_fx(function, tracing_mode="fake")(torch.randn(3, 3)).graph
    before = str(graph)
    with config.patch(size_asserts=True, alignment_asserts=True):
        UncheckedStrides()(graph)
        assert (config.size_asserts, config.alignment_asserts) == (checked, checked)
    assert str(graph) == before


@pytest.mark.parametrize(("function", "checked"), [(generated, False), (run_as_it_is, True)])
def test_each_size_is_asked_for_where_inputs_are_not_checked(
    function: Callable[[Tensor], Tensor], checked: bool
) -> None:
    """From torch 2.14 on the code would not know them: a NameError in the first step."""
    graph = make_fx(function, tracing_mode="symbolic")(torch.randn(3, 5)).graph
    (example,) = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    graph.eliminate_dead_code()
    with config.patch(size_asserts=True, alignment_asserts=True):
        UncheckedStrides()(graph)
    graph.lint()
    asked = [node.meta["val"] for node in graph.nodes if node.target is torch.ops.aten.sym_size.int]
    assert asked == ([] if checked else list(example.shape))


def test_code_is_kept_apart_by_the_length_of_its_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of Inductor's cache has its configuration in it, but not the processor, which may be another later."""
    seen: list[int | None] = []
    monkeypatch.setattr(compiling, "compile_fx", lambda *_: seen.append(config.cpp.simdlen))
    flat = captured_and_rewritten(Decoder(layers=1), {})[1].flat
    assert flat is not None
    for length in (None, 256):
        with config.patch({"cpp.simdlen": length}):
            compiling.compiled(flat, inductor=True)
            assert config.cpp.simdlen == length
    assert seen == [pick_vec_isa().bit_width(), 256]


@pytest.mark.parametrize("wrapper", ["cpp_wrapper", "fx_wrapper"])
def test_a_users_wrapper_is_not_for_the_rewritten_graph(wrapper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(compiling, "compile_fx", lambda *_: seen.append(getattr(config, wrapper)))
    flat = captured_and_rewritten(Decoder(layers=1), {})[1].flat
    assert flat is not None
    with config.patch({wrapper: True}):
        compiling.compiled(flat, inductor=True)
        assert getattr(config, wrapper)
    assert seen == [False]


def test_a_step_of_a_plain_decoder_has_no_checks_and_the_configuration_is_as_before() -> None:
    model, before = tiny("llama", num_hidden_layers=1), config.size_asserts
    with config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(lambda: compile_step_program(model, EngineConfig()))
    assert codes and not any(name in code for code in codes for name in ("assert_size_stride(", "assert_alignment("))
    assert config.size_asserts == before and config.post_grad_custom_post_pass is None


def test_without_a_compiler_the_graph_runs_as_it_is_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = Decoder(layers=1)
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        with caplog.at_level("WARNING", "selective_compile"):
            engine = Engine(model, EngineConfig(max_kv_tokens=1024))
            padded = torch.compile(model, backend="selective")(torch.tensor([[5, 6, 7]]))
        tokens = engine.submit([5, 6, 7], max_new_tokens=6, do_sample=False).result().tokens
    assert caplog.text.count("runs as it is, slowly, and not through Inductor: No working C++ compiler found") >= 2
    assert_same_tokens(model, [5, 6, 7], tokens)
    torch.testing.assert_close(padded, model(torch.tensor([[5, 6, 7]])))
