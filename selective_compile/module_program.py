"""A step program in which some modules of the model are called as they are, on the rows of all requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from selective_compile.captured import Captured
from selective_compile.isolated_op import running
from selective_compile.live_settings import follow
from selective_compile.module_state import lock_of, own_attributes
from selective_compile.optimizer_steps import count_steps_for
from selective_compile.options import EngineConfig
from selective_compile.passes import Rewrite
from selective_compile.passes.isolated_call import IsolatedCall
from selective_compile.skeleton import rebuilt, skeleton, structure_of
from selective_compile.step import StepInputs
from selective_compile.step_program import StepProgram
from selective_compile.tensor_state import States, states


class ModuleProgram(StepProgram):
    """As `StepProgram`; modules that were proved to treat tokens independently are called by their own Python.

    Such a module is one that cannot be captured, as a loop over the experts that were hit: it runs once in a step.
    """

    def __init__(
        self,
        model: nn.Module,
        rewritten: Rewrite,
        config: EngineConfig,
        *,
        max_positions: int | None,
        captured: Captured | None = None,
    ) -> None:
        super().__init__(model, rewritten, config, max_positions=max_positions, captured=captured)
        self.calls: list[IsolatedCall] = rewritten.traced.isolated
        copies = skeleton(model, {})
        self._modules = [copies.get_submodule(call.module) for call in self.calls]
        self._pairs = [
            pair
            for path in dict.fromkeys(call.module for call in self.calls)
            for pair in zip(model.get_submodule(path).modules(), copies.get_submodule(path).modules(), strict=True)
        ]
        self._changes = 0  # of plain attributes
        self._seen: States | None = None  # of the modules' tensors
        self._lock = lock_of(model)
        self.weights_version = self._versions
        count_steps_for(self)
        paths = ", ".join(dict.fromkeys(call.module for call in self.calls))
        self.not_captured = f"code of the model, which may read the device on the host, runs in each step: {paths}"

    def _logits(
        self,
        inputs: StepInputs,
        pools: Sequence[tuple[Tensor, Tensor]],
        states: Sequence[Tensor],
        scales: Sequence[Tensor],
    ) -> Tensor:
        with self._lock, running(self._called_once):
            return super()._logits(inputs, pools, states, scales)

    def _versions(self) -> tuple[States, int, States]:
        with self._lock:  # a step of another engine may have put its requests' attributes into the copies
            version = self.weights.version()
            if change := self._change():
                raise ValueError(f"the model must stay as it was compiled: {change}")
            for own, copied in self._pairs:
                copied._buffers.update(own._buffers)
                self._changes += follow(own, copied)
            self._seen = states(self.tensors(), self._seen)
            return version, self._changes, self._seen

    def is_of(self, model: nn.Module) -> bool:
        return super().is_of(model) and not self._change()

    def _change(self) -> str:
        """What the copies do not follow, in words; empty if there is none."""
        for own, copied in self._pairs:
            if type(own) is not type(copied):
                return f"a module that runs by itself must stay a {type(copied).__name__}, got a {type(own).__name__}"
        return ""

    def tensors(self) -> list[Tensor]:
        """Of the modules, as they are now."""
        tensors = (t for own, _ in self._pairs for t in (*own._parameters.values(), *own._buffers.values()))
        return [tensor for tensor in tensors if tensor is not None]

    def _called_once(self, number: int, values: list[Tensor]) -> list[Tensor]:
        """The results of call ``number`` that are used; ``values`` are those that the graph computed."""
        call = self.calls[number]
        tensors = [values[argument.value].clone() for argument in call.arguments]  # the module may write to them
        args, kwargs = rebuilt(call.structure, tensors)
        found: list[Any] = []
        with own_attributes(self._modules[number], {}):
            structure_of(self._modules[number](*args, **kwargs), found)
        return [found[index] for index in call.results]
