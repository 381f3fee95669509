"""What the scheduler knows of a request: its tokens, how many are computed, and its blocks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

RequestId = int | str


class RequestState:
    """One request as the scheduler and the batch assembly see it; the user's view is `request.Request`.

    `tokens` and `blocks` are arrays of machine integers, so that the batch assembly copies slices of them
    without a Python loop. The state is changed by the scheduler alone.
    """

    __slots__ = ("blocks", "computed", "finished", "number", "prompt_length", "request_id", "tokens")

    def __init__(self, request_id: RequestId, number: int, prompt_ids: Iterable[int]) -> None:
        self.request_id = request_id
        self.number = number  # the order of arrival; also tells two requests apart that used one id in turn
        self.tokens = array("q", prompt_ids)  # the prompt, then what was generated
        self.prompt_length = len(self.tokens)
        self.computed = 0  # how many of the tokens have their keys and values in the blocks
        self.blocks = array("i")  # block i holds tokens i * block_size ..
        self.finished = False

    @property
    def pending(self) -> int:
        """Tokens still to compute; the request is sampled in the step that computes the last of them."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    def __repr__(self) -> str:
        return (
            f"RequestState({self.request_id!r}, number={self.number}, prompt_length={self.prompt_length}, "
            f"tokens={len(self.tokens)}, computed={self.computed}, blocks={list(self.blocks)})"
        )
