"""Options: every wrong value and every unknown name is a ValueError that names it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from selective_compile.options import BackendOptions, EngineConfig


def test_defaults() -> None:
    assert dataclasses.asdict(EngineConfig()) == {
        "token_budget": 512,
        "max_requests": 64,
        "block_size": 32,
        "max_kv_tokens": None,
        "kv_memory_fraction": 0.9,
        "max_attention_window": None,
        "kv_dtype": "auto",
        "latents": "compressed",
        "host_kv_bytes": 0,
        "block_reuse": True,
        "scheduler_policy": "max_utilization",
        "waiting_order": "first_come",
        "batching": "inflight_fused",
        "prefill_slowdown": None,
        "overlap": False,
        "async_scheduling": None,
        "cuda_graphs": True,
        "keep_captures": True,
        "dtype": None,
        "weights": "model",
        "join_weights": True,
        "implementation": "auto",
        "threads": None,
        "seed": 0,
        "batch_invariant": False,
        "compile": True,
        "record": None,
        "fallback": "sequential",
    }
    assert dataclasses.asdict(BackendOptions()) == {
        "inductor": True,
        "implementation": "auto",
        "keep_traces": True,
    }


def test_blocks_are_larger_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large as a tile of the attention kernel."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert EngineConfig().block_size == 128
    assert EngineConfig(block_size=16).block_size == 16


@pytest.mark.parametrize(
    "options",
    [
        {"token_budget": 0},
        {"token_budget": 1.5},
        {"token_budget": True},
        {"max_requests": -1},
        {"block_size": 0},
        {"block_size": "16"},
        {"max_kv_tokens": 0},
        {"max_kv_tokens": 15},
        {"max_attention_window": 0},
        {"max_attention_window": 8.0},
        {"kv_dtype": "int4"},
        {"kv_dtype": torch.int8},
        {"kv_dtype": None},
        {"latents": "auto"},
        {"kv_memory_fraction": 0.0},
        {"kv_memory_fraction": 1.1},
        {"kv_memory_fraction": float("nan")},
        {"dtype": "float32"},
        {"dtype": torch.int64},
        {"implementation": "cuda"},
        {"threads": 0},
        {"threads": 1025},
        {"threads": 2.0},
        {"implementation": []},
        {"seed": -1},
        {"compile": 1},
        {"block_reuse": None},
        {"join_weights": None},
        {"scheduler_policy": "greedy"},
        {"waiting_order": None},
        {"batching": "v1"},
        {"prefill_slowdown": 1},
        {"prefill_slowdown": "2"},
        {"fallback": "isolate"},
        {"kv_dtype": np.array([1, 2])},
        {"implementation": np.array(["cpu", "auto"])},
        {"token_budget": np.bool_(True)},
        {"token_budget": np.array([64, 64])},
        {"seed": np.float64(1)},
        {"record": 7},
        {"host_kv_bytes": -1},
        {"host_kv_bytes": 10**20},
        {"token_budget": 2**24 + 1},
        {"max_requests": 2**20 + 1},
        {"max_kv_tokens": 2**31},
        {"max_attention_window": 10**20},
    ],
)
def test_engine_config_refuses(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"^{name} must be .*, got ") as error:
        EngineConfig(**options)
    assert str(error.value).endswith(repr(value))


@pytest.mark.parametrize("options", [{"inductor": "no"}, {"implementation": "gpu"}, {"keep_traces": 1}])
def test_backend_options_refuse(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(options))} must be .*, got "):
        BackendOptions(**options)


@pytest.mark.parametrize("options", [EngineConfig, BackendOptions])
def test_an_unknown_option_is_named_beside_the_known_ones(options: type) -> None:
    with pytest.raises(ValueError, match=rf"option of {options.__name__} must be one of .*, got 'block_sise'") as error:
        options(block_sise=16)
    for field in dataclasses.fields(options):
        assert field.name in str(error.value)


@pytest.mark.parametrize("options", [EngineConfig, BackendOptions])
def test_options_are_given_by_keyword(options: type) -> None:
    with pytest.raises(ValueError, match=rf"{options.__name__} must be given by keyword, as in .*, got 256 without a"):
        options(256)


@pytest.mark.parametrize(
    "name",
    ["token_budget", "max_requests", "block_size", "max_kv_tokens", "max_attention_window", "host_kv_bytes", "seed"],
)
def test_integers_of_any_kind_are_kept_as_integers(name: str) -> None:
    for given in (np.int64(64), np.uint8(64), torch.tensor(64)):
        config = EngineConfig(**{name: given})  # type: ignore[arg-type]
        assert type(getattr(config, name)) is int and config == EngineConfig(**{name: 64})  # type: ignore[arg-type]
    assert type(EngineConfig(threads=np.int64(1)).threads) is int  # type: ignore[arg-type]


def test_options_are_values() -> None:
    config = EngineConfig(block_size=8, dtype=torch.bfloat16)
    assert config == dataclasses.replace(EngineConfig(dtype=torch.bfloat16), block_size=8)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 4  # type: ignore[misc]
