"""Autocast in a model's forward, as accelerate's mixed precision puts it there: ragged, with the tokens of generate."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

import selective_compile as sc
from selective_compile import tiny_model
from selective_compile.kept_captures import ENDING
from selective_compile.kept_files import own_folder
from selective_compile.programs import compile_step_program
from tests.huggingface.models import tiny

PROMPTS = ("months from december:", "copy (td):", "letters q to v:", "count 12")
CONFIG = sc.EngineConfig(compile=False, block_size=16, max_kv_tokens=1024)


def in_mixed_precision(model: Any, dtype: torch.dtype) -> Any:
    """As `accelerate.Accelerator.prepare_model` does: autocast around the forward, and its results in float32."""
    inner = torch.autocast("cpu", dtype)(model.forward.__func__)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        results = inner(self, *args, **kwargs)
        return type(results)(
            {name: value.float() if isinstance(value, Tensor) else value for name, value in results.items()}
        )

    forward.__wrapped__ = inner  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_are_those_of_generate(dtype: torch.dtype) -> None:
    model, tokenizer = tiny_model.load()
    model = in_mixed_precision(model, dtype)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    assert sc.explain(model).verdict == "ragged"
    assert {site.pool_dtype for site in compile_step_program(model, CONFIG).call_sites} == {dtype}
    found = sc.generate(model, prompts, max_new_tokens=24, do_sample=False, engine_config=CONFIG)
    for prompt, tokens in zip(prompts, found, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0]
        assert tokens.tolist() == expected.tolist()


def test_a_second_start_takes_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    from selective_compile import kept_captures

    sc.Engine(in_mixed_precision(tiny("llama"), torch.bfloat16), CONFIG)
    assert list(own_folder().glob(f"*{ENDING}"))
    monkeypatch.setattr(kept_captures, "capture", None)
    sc.Engine(in_mixed_precision(tiny("llama"), torch.bfloat16), CONFIG)
