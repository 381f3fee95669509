"""A step as Inductor has compiled it, and soon by its native calls alone, where these give the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._inductor.output_code import CompiledFxGraph

from selective_compile.call_sequence import CallSequence
from selective_compile.call_values import NotFollowed
from selective_compile.compiling import give_back_free_pages
from selective_compile.forks import lock_of_any_process
from selective_compile.kernels import call_sequence_cpu, linear_cpu, ragged_attention_cpu
from selective_compile.layered import Layered
from selective_compile.native_calls import calls_through
from selective_compile.options import Implementation
from selective_compile.tensor_state import States

logger = logging.getLogger(__name__)
NATIVE_KERNELS = (linear_cpu, ragged_attention_cpu, call_sequence_cpu)  # that steps are made of
_LOOKING = lock_of_any_process()  # at what runs: one at a time
# Generated code is not ours: in another release of torch it may be of any form.
UNKNOWN = (
    *(NotFollowed, TypeError, AttributeError, NameError, LookupError, ValueError),
    *(ImportError, ArithmeticError, RuntimeError, AssertionError),
)


class CompiledStep:
    """Callable on the arguments of a flat graph, the weights first.

    The first step runs as it was compiled, and shows which code that is. The next one, and the first of another number
    of tokens, run both ways: only if the logits agree to the bit does that way stay. Keys and values are written twice
    then, last by the code that was compiled. What is not followed runs as it was compiled. `first_steps` has them run
    before there are requests.
    """

    def __init__(self, run: Callable[..., Any], examples: Sequence[Any], *, native: bool) -> None:
        """
        Args:
            run: gives a tuple of one tensor.
            examples: tensors like the arguments; sizes that may be others are symbolic.
            native: it was compiled by Inductor for CPUs, and our operators run by the native kernels.
        """
        self._run = run
        self._examples: Sequence[Any] | None = examples if native else None  # until its calls are known
        self._agreed: set[int] = set()
        self.sequence: CallSequence | None = None

    def __call__(self, arguments: Sequence[Tensor], num_weights: int, seen: States) -> Tensor:
        """
        Args:
            num_weights: how many of the arguments, the first, are weights.
            seen: the states of these; the same object as long as none changes.
        """
        sequence = self.sequence
        if sequence is not None:
            if len(self._agreed) > 1 or arguments[num_weights].shape[-1] in self._agreed:
                return sequence(arguments, seen)
            return self._both_ways(sequence, arguments, num_weights, seen)
        if self._examples is not None:
            return self._looked_at(self._examples, arguments, num_weights)
        return self._as_compiled(arguments)

    def _as_compiled(self, arguments: Sequence[Tensor]) -> Tensor:
        result: Tensor
        (result,) = self._run(*arguments)
        return result

    def _looked_at(self, examples: Sequence[Any], arguments: Sequence[Tensor], num_weights: int) -> Tensor:
        codes: list[list[Callable[..., Any]]] = []

        def looked_at(run: Callable[..., Any], given: Sequence[Any]) -> Any:
            with _generated_code(given) as ran:
                results = run(*given)
            codes.append(ran)
            return results

        with _LOOKING:
            (result,) = _through(self._run, lambda run, number, given: looked_at(run, given), arguments)
        self._examples = None
        try:
            for ran in codes:
                if len(ran) != 1:
                    raise NotFollowed(f"{len(ran)} compiled graphs of these arguments")
            if not all(argument.is_contiguous() for argument in arguments[num_weights:]):
                raise NotFollowed("an argument that is not contiguous")
            calls = calls_through(
                lambda follow, known: _through(
                    self._run, lambda run, number, given: follow(codes[number][0], given), known
                ),
                examples,
            )
            self.sequence = CallSequence(calls, num_arguments=len(arguments), num_weights=num_weights)
        except UNKNOWN as error:
            logger.info("steps run as they were compiled: %s: %s", type(error).__name__, str(error))
        else:
            logger.info("%d native calls of a step are made without the code around them", len(calls.calls))
        return result

    def _both_ways(self, sequence: CallSequence, arguments: Sequence[Tensor], num_weights: int, seen: States) -> Tensor:
        found = sequence(arguments, seen)
        result = self._as_compiled(arguments)
        if _same_bits(found, result):
            self._agreed.add(arguments[num_weights].shape[-1])
            give_back_free_pages()  # the code that was compiled may not need them again
        else:
            self.sequence = None
            logger.warning(
                "the native calls of a step gave other logits than its compiled code, which runs from now on"
            )
        return result


def runs_native(implementation: Implementation, device: torch.device) -> bool:
    """Whether the native kernels are those that run there, if they can be built."""
    return implementation in ("auto", "cpu") and device.type == "cpu"


def native_kernels_run() -> bool:
    """Whether the kernels that a step may be made of can be built here."""
    return all(each.available() for each in NATIVE_KERNELS)


def _through(run: Callable[..., Any], call: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """``call`` in the place of each piece that it was compiled in, with their numbers and arguments."""
    if isinstance(run, Layered):
        return run.through(call, arguments)
    return call(run, 0, arguments)


@contextmanager
def _generated_code(arguments: Sequence[Tensor]) -> Iterator[list[Callable[..., Any]]]:
    """What of Inductor's code runs on these very tensors meanwhile; other threads may run other code."""
    ran: list[Callable[..., Any]] = []
    wanted = list(map(id, arguments))
    original = CompiledFxGraph.__call__

    def noted(graph: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
        assert graph.current_callable is not None
        if list(map(id, inputs)) == wanted:
            ran.append(graph.current_callable)
        return original(graph, inputs)

    setattr(CompiledFxGraph, "__call__", noted)  # noqa: B010 - a method of another signature to mypy
    try:
        yield ran
    finally:
        setattr(CompiledFxGraph, "__call__", original)  # noqa: B010


def _same_bits(one: Tensor, other: Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype and other.is_contiguous()
    return alike and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
