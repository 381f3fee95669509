"""Steps of a model whose layers are compiled once: three graphs, however many layers, and the logits of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import selective_compile as sc
from selective_compile import compiling
from selective_compile.backend import compile_step_program
from selective_compile.call_values import NotFollowed
from selective_compile.compiled_step import native_kernels_run
from selective_compile.layered import Layered
from selective_compile.native_calls import _Run
from tests.exactness import logits_in_chunks, step_program
from tests.models import VOCABULARY, tiny

PROMPTS = [[(13 * place + 7 * n) % VOCABULARY for place in range(length)] for n, length in enumerate((7, 3, 11, 1))]
SMALL = {"hidden_size": 32, "intermediate_size": 48}
TURNS = {"num_hidden_layers": 14, "layer_types": ["sliding_attention", "full_attention"] * 7}


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {"num_hidden_layers": 9, **SMALL}), ("gemma2", {**TURNS, **SMALL})]
)
def test_three_graphs_give_the_logits_of_all_layers(family: str, changes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []
    through = compiling.through_inductor

    def noted(flat: Any, module: Any, *others: Any, **options: Any) -> Any:
        compiled.append(len(module.graph.nodes))
        return through(flat, module, *others, **options)

    monkeypatch.setattr(compiling, "through_inductor", noted)
    model = tiny(family, **changes)
    program: Any = compile_step_program(model, sc.EngineConfig(implementation="reference"))
    whole = step_program(model)
    assert isinstance(program._run._run, Layered) and len(compiled) == 3
    assert sum(compiled) < 0.6 * len(whole._flat.module.graph.nodes)
    for chunk in (4, 1):  # and so other numbers of tokens
        found, expected = (logits_in_chunks(each, PROMPTS, chunk) for each in (program, whole))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.skipif(not native_kernels_run(), reason="there is no C++ compiler here")
@pytest.mark.parametrize("followed", [True, False])
def test_the_native_calls_of_all_pieces_are_one_list(followed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or none, where one of the pieces does what is not followed."""
    model = tiny("llama", num_hidden_layers=8)
    if not followed:
        follow, seen = _Run.follow, [0]

        def fails(run: Any, call: Any, arguments: Any) -> Any:
            seen[0] += 1
            if seen[0] == 3:
                raise NotFollowed("the third piece")
            return follow(run, call, arguments)

        monkeypatch.setattr(_Run, "follow", fails)
    program: Any = compile_step_program(model, sc.EngineConfig())
    assert isinstance(program._run._run, Layered) and (program._run.sequence is not None) == followed
    whole = step_program(model)
    for chunk in (4, 1):
        found, expected = (logits_in_chunks(each, PROMPTS, chunk) for each in (program, whole))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
