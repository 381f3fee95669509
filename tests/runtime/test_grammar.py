"""Structured output: what comes follows the schema, the expression or the grammar, and is what `generate` gives."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import selective_compile as sc
from selective_compile.runtime.grammar import Grammars
from selective_compile.tiny_model.tokenizer import EOS
from tests.shipped import shipped

CONFIG = sc.EngineConfig(compile=False, max_kv_tokens=8192)
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["odd", "even"]}},
    "required": ["sum", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # or a text of blanks could go on for ever
}
STRUCTURES: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"json_schema": json.dumps(SCHEMA)},
    {"regex": "[a-c]{3,6}(-[0-9]{2})?"},
    {"grammar": 'start: "(" start ")" | "x"'},
]


def follows(structure: dict[str, Any], text: str) -> bool:
    if "json_schema" in structure:
        found = json.loads(text)
        return set(found) == {"sum", "kind"} and found["sum"] <= 99 and found["kind"] in ("odd", "even")
    return re.fullmatch(structure.get("regex", r"(\(*)x(\)*)"), text) is not None and text.count("(") == text.count(")")


@pytest.fixture(scope="module")
def served() -> tuple[Any, Any, Any]:
    return shipped()


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: next(iter(structure)))
def test_every_text_follows_and_greedy_equals_generate(served: tuple[Any, Any, Any], structure: dict[str, Any]) -> None:
    """Greedy, and twenty that are drawn nearly at random, beside a request without structure."""
    model, tokenizer, program = served
    engine = sc.Engine(model, CONFIG, program=program)
    prompt, free = tokenizer("12+7=").input_ids, engine.submit(tokenizer("3+4=").input_ids, max_new_tokens=5)
    options = {"max_new_tokens": 300, "tokenizer": tokenizer, **structure}
    greedy = engine.submit(prompt, **options)
    wild = [engine.submit(prompt, do_sample=True, top_k=0, temperature=3.0, seed=s, **options) for s in range(20)]
    ended = [request.result() for request in [greedy, *wild]]
    complete = [one for one in ended if one.finish_reason == "stop"]
    assert len(complete) > 5 and all(one.error is None for one in ended)
    for one in complete:
        assert one.tokens[-1] == EOS and follows(structure, tokenizer.decode(one.tokens[:-1]))
    assert tokenizer.decode(free.tokens, skip_special_tokens=True) == "7"
    values = {**structure, "tokenizer": tokenizer, "eos_token_id": [EOS]}
    made = Grammars().processor(values, prompt_length=len(prompt), vocab_size=model.config.vocab_size)
    ids = torch.tensor([prompt])
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(ended[0].tokens), logits_processor=[made]
    )
    assert theirs[0, len(prompt) :].tolist() == list(ended[0].tokens)


def test_generate_takes_a_structure_for_all_rows(served: tuple[Any, Any, Any]) -> None:
    model, tokenizer, _ = served
    prompts = [tokenizer(text).input_ids for text in ("12+7=", "3+4=")]
    rows = sc.generate(model, prompts, regex="[0-9]{4}", tokenizer=tokenizer, max_new_tokens=9, engine_config=CONFIG)
    for prompt, row in zip(prompts, rows, strict=True):
        assert re.fullmatch("[0-9]{4}", tokenizer.decode(row[len(prompt) :], skip_special_tokens=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "a(", "json_schema": None}, "regex must be one that can be compiled, got .*"),
        ({"regex": ""}, "regex must be a string that is not empty, got ''"),
        ({"grammar": "start: nothing"}, "grammar must be one that can be compiled"),
        ({"json_schema": "{"}, "json_schema must be JSON, got '{'"),
        ({"json_schema": 3}, "json_schema must be a dictionary or a string, got 3"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema must be one that can be compiled"),
        ({"regex": "a", "json_schema": {}}, "json_schema must be None beside regex, got both"),
        ({"regex": "a", "tokenizer": None}, "tokenizer must be a fast tokenizer for regex, got NoneType"),
        ({"regex": "a", "eos_token_id": None}, "eos_token_id must be set for regex, got None"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused(served: tuple[Any, Any, Any], options: dict[str, Any], message: str) -> None:
    model, tokenizer, program = served
    engine = sc.Engine(model, CONFIG, program=program)
    with pytest.raises(ValueError, match=message):
        engine.submit([65], **{"tokenizer": tokenizer, **options})
    with pytest.raises(ValueError, match="tokenizer must be a fast tokenizer for regex, got NoneType"):
        engine.submit([65], regex="a")
    assert engine.stats().waiting == 0


def test_without_the_package_only_grammars_are_refused(
    served: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    model, tokenizer, program = served
    engine = sc.Engine(model, CONFIG, program=program)
    with pytest.raises(ValueError, match="llguidance must be installed for regex"):
        engine.submit([65], regex="a", tokenizer=tokenizer)
    assert len(engine.submit([65], max_new_tokens=2).result().tokens) == 2


def test_the_runtime_is_there_without_the_package() -> None:
    code = "import sys; sys.modules['llguidance'] = None; import selective_compile.runtime"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_options_that_leave_no_token_end_the_request(served: tuple[Any, Any, Any]) -> None:
    model, tokenizer, program = served
    engine = sc.Engine(model, CONFIG, program=program)
    result = engine.submit([65], regex="a", tokenizer=tokenizer, min_new_tokens=4, max_new_tokens=6).result()
    assert result.finish_reason == "error" and "no token is left that follows the grammar" in str(result.error)
    assert tokenizer.decode(result.tokens) == "a"


def test_a_tokenizer_is_prepared_once(served: tuple[Any, Any, Any]) -> None:
    grammars = Grammars()
    values = {"regex": "a", "tokenizer": served[1], "eos_token_id": [EOS]}
    for _ in range(3):
        grammars.processor(values, prompt_length=1, vocab_size=259)
    ((tokenizer, prepared),) = grammars._prepared.items()
    assert tokenizer is served[1] and len(prepared) == 1
