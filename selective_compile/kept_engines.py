"""The engines behind `generate`: one or two for each model, kept for as long as the model lives."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from selective_compile.autocast import autocast_of
from selective_compile.backend import Program, StepProgram, compile_step_program
from selective_compile.forks import lock_of_any_process
from selective_compile.given_rows import FIRST, GivenRows, check_ids_are_only_looked_up, own_ids
from selective_compile.model_facts import device_of
from selective_compile.module_state import lock_of
from selective_compile.options import EngineConfig
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.kv_cache import num_blocks
from selective_compile.runtime.prompt import token_ids
from selective_compile.tensor_state import class_of, strides
from selective_compile.token_types import UNIT, typed

Kept = TypeVar("Kept")
# Rows of a table of embeddings at first: many short prompts, or a few long ones, before it has to grow.
ROWS = 2048


class KeptEngine:
    """A model compiled, with KV pools for the largest call so far.

    The program outlives the pools: a larger call brings larger pools, and nothing is compiled again. What is
    kept has no reference to the model, only to its tensors, or the model would never be freed.
    """

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self._config = config
        with lock_of(model):  # a run may have put other modules into it
            self._layout = layout_of(model)
        self._autocast = autocast_of(device_of(model))
        self.program: Program = compile_step_program(model, config)
        self._lock = lock_of_any_process()
        self._engine: Engine | None = None
        self._blocks_asked = 0

    def fits(self, model: nn.Module, config: EngineConfig) -> bool:
        """Whether the program is still that of the model."""
        with lock_of(model):
            same = config == self._config and autocast_of(device_of(model)) == self._autocast
            return same and layout_of(model) == self._layout and self.program.is_of(model)

    def engine_for(self, model: nn.Module, lengths: Sequence[int]) -> Engine:
        """An engine whose pools hold requests of these lengths, or as much as the configuration allows."""
        blocks = self._blocks_for(lengths)
        with self._lock:
            if self._engine is None or self._engine.lost or blocks > self._blocks_asked:
                alias: Any = weakref.proxy(model)
                self._engine = None  # its pools go before others are allocated
                self._blocks_asked = blocks
                self._engine = Engine(alias, self._sized(blocks), program=self.program)
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
        program = self.program
        limit, *_ = num_blocks(
            program.call_sites, self._config, max_positions=program.max_positions, device=program.device
        )
        return dataclasses.replace(self._config, max_kv_tokens=min(blocks, limit) * self._config.block_size)


class KeptRows:
    """The engine of a model's copy that reads embeddings from a table, whose rows are lent to the calls."""

    def __init__(self, model: nn.Module, config: EngineConfig, capacity: int, *, with_types: bool = False) -> None:
        """
        Args:
            with_types: for prompts whose tokens have types.

        Raises:
            ValueError: as `GivenRows` and `KeptEngine`; or the model runs whole, by its own caches.
        """
        self._given = GivenRows(model, capacity, with_types=with_types)
        self._kept = KeptEngine(self._given.model, config)
        if not isinstance(self._kept.program, StepProgram):
            what = "token_type_ids" if with_types else "inputs_embeds"
            raise ValueError(f"{what} must be None for a model that runs whole, one request after another")
        program, flat = self._kept.program, self._kept.program.rewritten.flat
        assert flat is not None
        self._conditions = program.weights.conditions_of(model)
        self.num_types = check_ids_are_only_looked_up(flat, type(model).__name__)
        program.num_ids = self.num_types * UNIT if with_types else FIRST + capacity
        program.known_ids = min(own_ids(flat) or program.vocab_size, program.vocab_size)
        self._free = list(range(capacity))
        self._salts = itertools.count()
        self._lock = lock_of_any_process()

    @property
    def capacity(self) -> int:
        return self._given.capacity

    def fits(self, model: nn.Module, config: EngineConfig) -> bool:
        """Whether the program is still that of a copy of the model."""
        with lock_of(model):
            is_of = self._given.is_of(model) and not self._conditions.change()
            return is_of and self._kept.fits(self._given.model, config)

    def follow(self, model: nn.Module) -> None:
        """What the model has anew that nothing compiled depends on."""
        self._given.follow(model)

    def engine_for(self, lengths: Sequence[int]) -> Engine:
        return self._kept.engine_for(self._given.model, lengths)

    def typed(self, ids: Any, types: Tensor) -> list[int]:
        """As `typed`, of ids of tokens, or of `Lent` ones.

        Raises:
            ValueError: the model knows one of them not.
        """
        own: list[int] = torch.as_tensor(ids, dtype=torch.int64, device="cpu").tolist()
        token_ids([token for token in own if token < FIRST], self._kept.program.known_ids, least=0)
        return typed(own, types)

    def lend(self, prompts: Sequence[Tensor]) -> Lent | None:
        """Ids for prompts [n, hidden] until they are given back; None: there are not as many rows left.

        Raises:
            ValueError: they are not such embeddings as the model's own.
        """
        for rows in prompts:
            self._given.check(rows)
        count = sum(map(len, prompts))
        with self._lock:
            if count > len(self._free):
                return None
            places = [self._free.pop() for _ in range(count)]
            # Rows are lent again, and no block that was computed of those before them may be found by their ids.
            salt = f"embeddings {next(self._salts)}"
        taken = iter(places)
        ids = [self._given.put(list(itertools.islice(taken, len(rows))), rows) for rows in prompts]
        return Lent(ids=ids, salt=salt, places=places)

    def give_back(self, lent: Lent) -> None:
        with self._lock:
            self._free += lent.places


@dataclass(frozen=True, kw_only=True)
class Lent:
    """The ids of each prompt, under a `cache_salt` of their own, and the places of their rows."""

    ids: list[list[int]]
    salt: str
    places: list[int]


class ByModel(Generic[Kept]):
    """Something for each model that lives; not an attribute of the model, which stays as it is."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[nn.Module, Kept] = weakref.WeakKeyDictionary()
        self._lock = lock_of_any_process()

    def of(self, model: nn.Module) -> Kept | None:
        with self._lock:
            return self._kept.get(model)

    def keep(self, model: nn.Module, kept: Kept) -> Kept:
        with self._lock:
            self._kept[model] = kept
        return kept

    def drop(self, model: nn.Module) -> bool:
        """Whether there was something."""
        with self._lock:
            return self._kept.pop(model, None) is not None


class KeptEngines:
    """A `KeptEngine` for each model; who asks for one waits for who makes one of the same model, and no other."""

    def __init__(self) -> None:
        self._kept = ByModel[KeptEngine]()
        self._rows = {with_types: ByModel[KeptRows]() for with_types in (False, True)}

    def engine_for(self, model: nn.Module, config: EngineConfig, lengths: Sequence[int]) -> Engine:
        """The model's engine; compiled anew where the configuration or the layout of its weights is another.

        Raises:
            ValueError: the model cannot be rewritten, or the configuration does not go with it.
        """
        with lock_of(model):
            kept = self._kept.of(model)
            if kept is None or not kept.fits(model, config):
                self._kept.drop(model)
                kept = self._kept.keep(model, KeptEngine(model, config))
        return kept.engine_for(model, lengths)

    @contextmanager
    def lent(
        self, model: nn.Module, config: EngineConfig, prompts: Sequence[Tensor], *, with_types: bool = False
    ) -> Iterator[tuple[KeptRows, Lent]]:
        """An engine that knows prompts [n, hidden] of embeddings by ids, for as long as the context lasts.

        Args:
            with_types: ids tell the types of tokens too; with or without prompts of embeddings.

        Raises:
            ValueError: the model cannot be rewritten so, or the prompts are not such embeddings as its own.
        """
        with lock_of(model):
            every = self._rows[with_types]
            kept = every.of(model)
            if kept is None or not kept.fits(model, config):
                capacity = _rows_for(prompts, ROWS)
                kept = every.keep(model, KeptRows(model, config, capacity, with_types=with_types))
            kept.follow(model)
            lent = kept.lend(prompts)
            if lent is None:  # those who have rows of the smaller table keep its engine until they end
                capacity = _rows_for(prompts, 2 * kept.capacity)
                kept = every.keep(model, KeptRows(model, config, capacity, with_types=with_types))
                lent = kept.lend(prompts)
                assert lent is not None
        try:
            yield kept, lent
        finally:
            kept.give_back(lent)

    def drop(self, model: nn.Module) -> bool:
        """Whether there was an engine."""
        with lock_of(model):
            every: list[ByModel[Any]] = [self._kept, *self._rows.values()]
            dropped = [each.drop(model) for each in every]
        return any(dropped)


def _rows_for(prompts: Sequence[Tensor], least: int) -> int:
    """At least as many as the prompts have; by powers of two, or each longer call would compile anew."""
    needed = sum(map(len, prompts))
    return max(least, 1 << max(0, needed - 1).bit_length())


def layout_of(model: nn.Module) -> tuple[Any, ...]:
    """What a program takes for granted of the weights: where they are, names, classes, shapes, dtypes, strides, ties.

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


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return class_of(tensor), tensor.shape, tensor.dtype, tensor.device, strides(tensor)
