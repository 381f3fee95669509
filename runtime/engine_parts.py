"""What an engine is made of, each part configured for the model."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from selective_compile.backend import Program
from selective_compile.model_facts import uncompiled
from selective_compile.options import EngineConfig
from selective_compile.programs import compile_step_program
from selective_compile.runtime.assistants import Assistants
from selective_compile.runtime.batch import BatchAssembler
from selective_compile.runtime.device_stream import DeviceStream
from selective_compile.runtime.flights import Flights
from selective_compile.runtime.intake import Intake
from selective_compile.runtime.kv_cache import LONGEST
from selective_compile.runtime.model_runner import ModelRunner
from selective_compile.runtime.recording import Recording, recording_of
from selective_compile.runtime.scheduler import Scheduler

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from selective_compile.runtime.engine import Engine


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """The parts that do not know of each other's state.

    Attributes:
        longest: the most tokens that a request can come to compute.
    """

    runner: ModelRunner
    scheduler: Scheduler
    assembler: BatchAssembler
    flights: Flights
    intake: Intake
    assistants: Assistants
    recording: Recording
    longest: int

    @classmethod
    def of(
        cls,
        model: nn.Module,
        config: EngineConfig,
        program: Program | None,
        make_engine: Callable[..., Engine],
        stream: DeviceStream | None = None,
    ) -> EngineParts:
        """Compile the model, if `program` is not that, and allocate the pools; `make_engine` is for assistants.

        Raises:
            ValueError: the model cannot be rewritten, or the configuration does not go with it.
            OSError: `config.record` is no place to write to.
        """
        runner = ModelRunner(model, config, program, stream=stream)
        alike = _alike(config, runner)

        def drafting(model: nn.Module) -> Engine:
            inner = uncompiled(model)
            alias: Any = weakref.proxy(inner)
            return make_engine(alias, alike, program=compile_step_program(inner, alike))

        assistants = Assistants(drafting)
        config = replace(config, max_requests=runner.max_requests)
        if not runner.program.pauses:
            config = replace(config, scheduler_policy="guaranteed_no_evict")
        reuses_blocks = config.block_reuse and _whole_in_blocks(runner.program)
        scheduler = Scheduler.configured(
            config, runner.num_blocks, block_reuse=reuses_blocks, host_slots=runner.host_slots
        )
        pool_tokens = scheduler.blocks.most_tokens or LONGEST
        longest = min(pool_tokens, runner.program.max_positions or pool_tokens)
        flights = Flights(ahead=_steps_ahead(runner, config))
        if (reason := runner.program.not_captured) and runner.stream.captures and config.cuda_graphs:
            logger.info("steps are launched kernel by kernel, and not captured: %s", reason)
        if flights.ahead and runner.captures(config):
            runner.capture_steps(config, max_blocks=-(-longest // config.block_size))
            runner.check_graphs()
            logger.info("steps are captured as %d graphs at most", runner.captured_graphs[1])
        return cls(
            runner=runner,
            scheduler=scheduler,
            assembler=_assembler(runner, config, longest, turns=flights.ahead + 1),
            flights=flights,
            intake=Intake(
                model,
                runner.program,
                config,
                reuses_blocks=reuses_blocks,
                pool_tokens=pool_tokens,
                fits_together=scheduler.fits_together,
                assistants=assistants,
            ),
            assistants=assistants,
            recording=_recording(model, config, runner, reuses_blocks),
            longest=longest,
        )


def _whole_in_blocks(program: Program) -> bool:
    """Whether another request can go on from a prefix by its blocks alone.

    Not from what a program keeps by request, outside of its pools, nor from what recurrences keep, which is of a
    request's last token and not of the middle of it.
    """
    return bool(program.call_sites) and not program.keeps_requests and not program.state_sites


def _alike(config: EngineConfig, runner: ModelRunner) -> EngineConfig:
    """For an assistant: as many blocks as the model itself has, which are found again from step to step; host memory is
    the model's, and so are keys and values in int8, which an assistant may be refused with."""
    first = next(iter(runner.num_blocks.values()), None)
    return replace(
        config,
        max_kv_tokens=config.max_kv_tokens if first is None else first * config.block_size,
        block_reuse=True,
        host_kv_bytes=0,
        kv_dtype="auto",
        scheduler_policy="max_utilization",
        record=None,
    )


def _steps_ahead(runner: ModelRunner, config: EngineConfig) -> int:
    """How many steps may be on the device while the next one is scheduled.

    Raises:
        ValueError: it is asked for, and the model is computed with what the host keeps of each request.
    """
    wanted = config.async_scheduling
    if runner.program.keeps_requests:
        if wanted:
            raise ValueError("async_scheduling must be None or False for a model of which something runs by itself")
        return 0
    by_itself = runner.stream.separate and config.record is None
    return int(by_itself if wanted is None else wanted)


def _assembler(runner: ModelRunner, config: EngineConfig, longest: int, *, turns: int) -> BatchAssembler:
    return BatchAssembler(
        token_budget=config.token_budget,
        max_requests=config.max_requests,
        block_size=config.block_size,
        max_blocks=-(-longest // config.block_size),
        device=runner.program.device,
        num_tables=len(runner.num_blocks),
        marks_positions=runner.program.marks_positions,
        batch_invariant=runner.invariant,
        stream=runner.stream,
        turns=turns,
    )


def _recording(model: nn.Module, config: EngineConfig, runner: ModelRunner, reuses_blocks: bool) -> Recording:
    return recording_of(
        config,
        model,
        name=type(model).__name__,
        vocab_size=runner.program.vocab_size,
        pools=[(reach.window, reach.chunk, blocks) for reach, blocks in runner.num_blocks.items()],
        host_slots=runner.host_slots,
        max_requests=runner.max_requests,
        reuses_blocks=reuses_blocks,
    )
