"""`torch.compile(model, backend="selective")` and `generate` together."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

import selective_compile as sc
from selective_compile.coverage.random_model import random_model
from selective_compile.generate_requests import ENGINES
from tests.huggingface.models import CONFIG, ROOT, left_padded, tiny
from tests.oracle import MARGIN


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_generate_of_a_compiled_model_gives_the_same_tokens(family: str) -> None:
    """Its graphs carry a Hugging Face cache: they run as they came."""
    model = tiny(family)
    ids, mask = left_padded()
    before = model.generate(ids, attention_mask=mask, max_new_tokens=8)
    model.compile(backend="selective", options={"inductor": False})
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=8), before)
    assert torch.equal(sc.generate(model, ids, attention_mask=mask, max_new_tokens=8, engine_config=CONFIG), before)


def test_generate_takes_a_compiled_model() -> None:
    model, (ids, mask) = tiny(), left_padded()
    fast = torch.compile(model, backend="selective", options={"inductor": False})
    result = sc.generate(fast, ids, attention_mask=mask, max_new_tokens=4, engine_config=CONFIG)
    assert torch.equal(result, model.generate(ids, attention_mask=mask, max_new_tokens=4))
    assert ENGINES.engine_for(model, CONFIG, [1]).stats().steps == 4, "that of the model, compiled once"


def test_a_compiled_model_is_served_as_the_model_itself() -> None:
    """Nothing is traced through what compiled it; as its `generate` is the model's."""
    model = tiny()
    fast = torch.compile(model, backend="eager")
    of_both = [replace(sc.explain(each), passes=()) for each in (fast, model)]  # of passes it tells the seconds, too
    assert of_both[0] == of_both[1]
    engine = sc.Engine(fast, CONFIG)
    assert engine.submit([3, 4, 5], max_new_tokens=3).result().tokens == tuple(
        model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3)[0, 3:].tolist()
    )
    with pytest.raises(ValueError, match="evaluation mode"):
        sc.Engine(torch.compile(model.train(), backend="eager"), CONFIG)


@pytest.mark.parametrize("family", ["llama", "xlnet"])
def test_a_model_compiled_in_place_is_tried_as_it_is_itself(family: str) -> None:
    """Whatever compiles it is not asked; it would compile each length that is tried."""
    model, calls, ids = tiny() if family == "llama" else random_model(family).eval(), [], torch.tensor([[3, 4, 5]])
    expected = model.generate(ids, max_new_tokens=3, pad_token_id=0)

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph.forward

    model.compile(backend=backend)
    sc.explain(model)
    with sc.wrapped(model, CONFIG):
        assert torch.equal(model.generate(ids, max_new_tokens=3, pad_token_id=0), expected)
    assert not calls


@pytest.mark.parametrize("wrapped", ["the model", "what is compiled"])
def test_a_compiled_model_has_the_settings_that_were_given_to_wrap(wrapped: str) -> None:
    model = tiny()
    fast, ids = torch.compile(model, backend="eager"), torch.tensor([[3, 4, 5]])
    expected = model.generate(ids, max_new_tokens=3)
    with sc.wrapped(model if wrapped == "the model" else fast, CONFIG):
        assert torch.equal(fast.generate(ids, max_new_tokens=3), expected)
        assert torch.equal(sc.generate(fast, ids, max_new_tokens=3), expected)
        assert ENGINES.engine_for(model, CONFIG, [1]).stats().steps == 6
    assert torch.equal(fast.generate(ids, max_new_tokens=3), expected)


FRESH = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2,
)).eval()
ids, mask = torch.arange(22).view(2, 11), torch.ones(2, 11, dtype=torch.int64)
mask[0, :4] = 0
assert "selective_compile" not in sys.modules
fast = torch.compile(model, backend="selective", options={"inductor": False})
with torch.no_grad():
    difference = (fast(ids, attention_mask=mask).logits - model(ids, attention_mask=mask).logits)[mask.bool()]
assert difference.abs().max() < MARGIN, difference
from selective_compile import selective
assert selective.reports[-1].ok, selective.reports[-1]
"""


def test_backend_by_name_in_a_fresh_process(tmp_path: Path) -> None:
    """By its entry point; where the package is not installed, by a copy of what an install would write."""
    environment = {**os.environ, "PYTHONPATH": ""}
    if "selective" not in entry_points(group="torch_dynamo_backends").names:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        info = tmp_path / f"selective_compile-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: selective-compile\nVersion: {project['version']}\n"
        )
        ((group, points),) = project["entry-points"].items()
        lines = [f"{name} = {target}" for name, target in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    code = FRESH.replace("MARGIN", repr(MARGIN))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wrap_is_of_the_model_and_not_of_what_compiled_it() -> None:
    model = tiny()
    fast, ids = torch.compile(model, backend="eager"), torch.tensor([[3, 4, 5]])
    expected = model.generate(ids, max_new_tokens=3)
    sc.wrap(model, CONFIG)
    with pytest.raises(ValueError, match="must not be wrapped already"):
        sc.wrap(fast, CONFIG)
    assert sc.unwrap(fast) is fast and "generate" not in vars(model)
    sc.wrap(fast, CONFIG)
    other = copy.deepcopy(fast)
    assert torch.equal(other.generate(ids, max_new_tokens=3), expected)
    assert ENGINES.engine_for(other._orig_mod, CONFIG, [1]).stats().steps == 3, "a copy is wrapped, too"
    assert sc.unwrap(other) is other
    assert torch.equal(sc.unwrap(model).generate(ids, max_new_tokens=3), expected)
