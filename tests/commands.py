"""Runs commands in this process, on a small model that is loaded and proved once for all of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from selective_compile import checkpoints, cli, demo
from selective_compile.backend import Program, compile_step_program
from selective_compile.checkpoints import Checkpoint
from selective_compile.options import EngineConfig
from selective_compile.runtime import model_runner, replay_engine
from selective_compile.tiny_model.tokenizer import BOS, EOS, PAD, VOCAB_SIZE, build

LOAD = checkpoints.load
OF_PROGRAMS = (
    *("compile", "dtype", "fallback", "implementation", "batch_invariant"),
    *("kv_dtype", "latents", "max_attention_window", "threads", "weights"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with random weights: to the commands, a model that is not the one that ships."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    ends = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    config = LlamaConfig(vocab_size=VOCAB_SIZE, **sizes, **heads, **ends, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(path)
    build().save_pretrained(path)
    return str(path)


@functools.cache
def loaded(name: str | None = None, **options: Any) -> Checkpoint:
    return LOAD(name, **options)


@functools.cache
def proved(model: nn.Module, options: tuple[Any, ...]) -> Program:
    return compile_step_program(model, EngineConfig(**dict(zip(OF_PROGRAMS, options, strict=True))))


@pytest.fixture(autouse=True)
def found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one command has loaded and proved, the next one has: each would do the same, some seconds long."""
    monkeypatch.setattr(checkpoints, "load", loaded)

    def program_of(model: nn.Module, config: EngineConfig) -> Program:
        return proved(model, tuple(getattr(config, name) for name in OF_PROGRAMS))

    for module in (demo, model_runner, replay_engine):
        monkeypatch.setattr(module, "compile_step_program", program_of)


def run(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, arguments, input=input, env={"COLUMNS": "100", "NO_COLOR": "1"})


def ok(*arguments: str, input: str | None = None) -> Result:
    result = run(*arguments, input=input)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: str, input: str | None = None, status: int = 1) -> str:
    """The one line that says what is wrong."""
    result = run(*arguments, input=input)
    assert result.exit_code == status
    assert isinstance(result.exception, SystemExit), "a traceback"
    return result.stderr
