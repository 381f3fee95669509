"""A step program that keeps what the engine saw of each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from selective_compile.runtime.stats import StepRecord
from selective_compile.step import StepInputs


class Recorder:
    """A step program that keeps the logits of each request's rows, by request id."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self._last: Tensor | None = None
        self.logits: dict[Any, list[Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def __call__(
        self, inputs: StepInputs, pools: Sequence[tuple[Tensor, Tensor]], states: Sequence[Tensor] = ()
    ) -> Tensor:
        logits: Tensor = self._program(inputs, pools, states)
        self._last = logits.clone()  # the sampler may write to them
        return logits

    def observe(self, record: StepRecord) -> None:
        assert self._last is not None
        sampling = [share.request_id for share in record.shares if share.samples]
        for row, request_id in enumerate(sampling):
            self.logits.setdefault(request_id, []).append(self._last[row])
