"""The engines behind `generate`: one for each model, kept for as long as the model lives."""

from __future__ import annotations

import dataclasses
import heapq
import weakref
from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch import nn

from selective_compile.backend import Program, compile_step_program
from selective_compile.options import EngineConfig
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.kv_cache import num_blocks


class KeptEngine:
    """A model compiled, with KV pools for the largest call so far.

    The program outlives the pools: a larger call brings larger pools, and nothing is compiled again. What is
    kept has no reference to the model, only to its tensors, or the model would never be freed.
    """

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self._config = config
        self._layout = layout_of(model)
        self._program: Program = compile_step_program(model, config)
        self._lock = Lock()
        self._engine: Engine | None = None
        self._blocks_asked = 0

    def fits(self, model: nn.Module, config: EngineConfig) -> bool:
        """Whether the program is still that of the model."""
        return config == self._config and layout_of(model) == self._layout and self._program.is_of(model)

    def engine_for(self, model: nn.Module, lengths: Sequence[int]) -> Engine:
        """An engine whose pools hold requests of these lengths, or as much as the configuration allows."""
        blocks = self._blocks_for(lengths)
        with self._lock:
            if self._engine is None or blocks > self._blocks_asked:
                alias: Any = weakref.proxy(model)
                self._engine = None  # its pools go before others are allocated
                self._blocks_asked = blocks
                self._engine = Engine(alias, self._sized(blocks), program=self._program)
            # From call to call the weights may change in ways that are not counted, and nobody would think of
            # telling an engine that he does not see.
            self._engine.drop_computed(if_idle=True)
            return self._engine

    def _blocks_for(self, lengths: Sequence[int]) -> int:
        if self._config.max_kv_tokens is not None:
            return self._config.max_kv_tokens // self._config.block_size
        together = heapq.nlargest(self._config.max_requests, lengths)
        return sum(-(-length // self._config.block_size) for length in together)

    def _sized(self, blocks: int) -> EngineConfig:
        program = self._program
        limit, *_ = num_blocks(
            program.call_sites, self._config, max_positions=program.max_positions, device=program.device
        )
        return dataclasses.replace(self._config, max_kv_tokens=min(blocks, limit) * self._config.block_size)


class KeptEngines:
    """A `KeptEngine` for each model that lives; not an attribute of the model, which stays as it is."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[nn.Module, KeptEngine] = weakref.WeakKeyDictionary()
        self._lock = Lock()

    def engine_for(self, model: nn.Module, config: EngineConfig, lengths: Sequence[int]) -> Engine:
        """The model's engine; compiled anew where the configuration or the layout of its weights is another.

        Raises:
            ValueError: the model cannot be rewritten, or the configuration does not go with it.
        """
        with self._lock:
            kept = self._kept.get(model)
            if kept is None or not kept.fits(model, config):
                self._kept.pop(model, None)
                kept = self._kept[model] = KeptEngine(model, config)
        return kept.engine_for(model, lengths)

    def drop(self, model: nn.Module) -> None:
        with self._lock:
            self._kept.pop(model, None)


def layout_of(model: nn.Module) -> tuple[Any, ...]:
    """What a program takes for granted of the weights: where they are, names, shapes, dtypes, devices, ties.

    A module is told by its dictionary of parameters: the program holds it, so that no other has its id.
    """
    first: dict[int, int] = {}
    return tuple(
        (
            id(module._parameters),
            tuple((name, first.setdefault(id(t), len(first)), *_kind(t)) for name, t in _own_tensors(module)),
        )
        for module in model.modules()
        if module._parameters or module._buffers
    )


def _own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in named if tensor is not None]


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
