"""`torch.set_default_device` and `set_default_dtype` say what tensors of a user are made as, and the locale how texts
are written: not those of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

import selective_compile as sc
from selective_compile.generate_requests import ENGINES
from tests.huggingface.models import CONFIG, left_padded, tiny

ROOT = Path(__file__).parents[1]
OF_A_DEVICE = {function.__name__ for function in _device_constructors()}
OF_FLOATS = {"empty", "eye", "linspace", "logspace", "normal", "ones", "rand", "randn", "zeros"}
RUNS = {"Popen", "call", "check_call", "check_output", "run"}
CALLS: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [5], "min_new_tokens": 3},
    {"num_beams": 3, "num_return_sequences": 2},
    {"num_beams": 2, "return_dict_in_generate": True, "output_scores": True},
    {"prompt_lookup_num_tokens": 3},
    {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
)


@contextmanager
def made_by_default(device: str | None = None, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("folder", ["selective_compile", "passes", "runtime"])
def test_all_that_is_made_is_told_where_and_of_what(folder: str) -> None:
    silent = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and _needed(call.func) - {keyword.arg for keyword in call.keywords}
    ]
    assert not silent, "without device or dtype:\n" + "\n".join(silent)


def _needed(called: ast.expr) -> set[str]:
    if not isinstance(called, ast.Attribute) or not isinstance(called.value, ast.Name) or called.value.id != "torch":
        return set()
    return ({"device"} if called.attr in OF_A_DEVICE else set()) | ({"dtype"} if called.attr in OF_FLOATS else set())


@pytest.mark.parametrize("folder", ["selective_compile", "passes", "runtime"])
def test_texts_are_read_and_written_as_utf_8(folder: str) -> None:
    silent = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and _is_of_text(call)
        if "encoding" not in {keyword.arg for keyword in call.keywords}
    ]
    assert not silent, "without encoding:\n" + "\n".join(silent)


def _is_of_text(call: ast.Call) -> bool:
    """Whether it reads or writes a file as text, or the output of a process."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in ("read_text", "write_text") or "text" in {keyword.arg for keyword in call.keywords if name in RUNS}


@pytest.mark.parametrize(
    "defaults",
    [{"device": "meta"}, {"dtype": torch.bfloat16}, {"dtype": torch.float16}, {"dtype": torch.float64}],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_call_gives_the_same_whatever_is_made_by_default(family: str, defaults: dict[str, Any]) -> None:
    model, (ids, mask) = tiny(family), left_padded()
    expected = [_values(model, ids, mask, options) for options in CALLS]
    ENGINES.drop(model)
    with made_by_default(**defaults):
        found = [_values(model, ids, mask, options) for options in CALLS]
    for each, other in zip(found, expected, strict=True):
        assert [value.dtype for value in each] == [value.dtype for value in other]
        assert all(torch.equal(value, same) for value, same in zip(each, other, strict=True))


def _values(model: Any, ids: torch.Tensor, mask: torch.Tensor, options: dict[str, Any]) -> list[torch.Tensor]:
    result = sc.generate(model, ids, attention_mask=mask, max_new_tokens=6, engine_config=CONFIG, **options)
    if isinstance(result, torch.Tensor):
        return [result]
    named = [value for value in result.values() if value is not None]
    return [each for value in named for each in ([value] if isinstance(value, torch.Tensor) else value)]
