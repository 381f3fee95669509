"""The stopping criteria of a request: transformers' own list, and what of it is told from numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation import stopping_criteria as kinds

from selective_compile.runtime.generation_fields import FIELDS


class Stop(NamedTuple):
    """What ends a request without asking anybody."""

    max_new_tokens: int
    eos_token_ids: frozenset[int]


class RowCriteria:
    """Asks a request's criteria after each of its tokens in turn."""

    def __init__(self, criteria: Sequence[Any], *, with_scores: bool, device: torch.device) -> None:
        """
        Args:
            with_scores: they get the processed scores of all steps so far, in place of None, as in `generate`.
            device: that the tokens are on, as in `generate`; those of transformers get them on the CPU, where nobody
                waits for the device.
        """
        self._clocks = kinds.StoppingCriteriaList(each for each in criteria if type(each) is kinds.MaxTimeCriteria)
        self._others = kinds.StoppingCriteriaList(each for each in criteria if each not in self._clocks)
        self._scores: tuple[Tensor, ...] | None = () if with_scores else None
        ours = all(type(each) is kinds.StopStringCriteria for each in self._others)
        self._device = torch.device("cpu") if ours else device

    @property
    def by_clock(self) -> bool:
        """Whether it depends on the time when the request ends."""
        return bool(self._clocks)

    @torch.no_grad()
    def __call__(self, history: Sequence[int], token: int, scores: Tensor | None) -> Literal["stop", "length"] | None:
        """Why the request ends with this token: "length" where only its time is up; None: it goes on.

        The host waits for the answer, so that what they keep on the device is there for whoever asks them next, in
        whatever stream.

        Args:
            history: the tokens before it.
            scores: [V], the processed scores that it was chosen by, where they are kept.

        Raises:
            Whatever a criterion raises.
        """
        ids = torch.from_numpy(np.array([*history, token], dtype=np.int64))[None].to(self._device)
        if self._scores is not None and scores is not None:
            self._scores += (scores[None],)
        if bool(self._others(ids, self._scores).all()):
            return "stop"
        return "length" if bool(self._clocks(ids, self._scores).all()) else None


def row_criteria(
    values: Mapping[str, Any], prompt_length: int, device: torch.device
) -> tuple[RowCriteria | None, Stop]:
    """The criteria to ask after each token, and those that are numbers.

    Args:
        values: the request's fields, checked; `max_new_tokens` is resolved.
        device: of the logits.

    Raises:
        ValueError: stop strings without a tokenizer, or criteria that are none.
    """
    lengths: list[int] = []
    ends: set[int] = set()
    asked: list[Any] = []
    for each in _list_of_transformers(values, prompt_length):
        # Compared exactly: a class derived from one of these does something else.
        if type(each) is kinds.MaxLengthCriteria:
            lengths.append(each.max_length)
        elif type(each) is kinds.EosTokenCriteria:
            ends.update(each.eos_token_id.reshape(-1).tolist())
        else:
            asked.append(each)
    numbers = Stop(max(1, min(lengths) - prompt_length), frozenset(ends))  # one of the fields, or in its place
    if not asked:
        return None, numbers
    with_scores = bool(values.get("output_scores"))
    return RowCriteria(asked, with_scores=with_scores, device=device), numbers


def beam_criteria(values: Mapping[str, Any], prompt_length: int) -> Any:
    """The list that says of each of a request's candidates whether it has ended; as `row_criteria` else."""
    return kinds.StoppingCriteriaList(_list_of_transformers(values, prompt_length))


def _list_of_transformers(values: Mapping[str, Any], prompt_length: int) -> list[Any]:
    """As `generate` makes it for this request alone."""
    given = values.get("stopping_criteria")
    given = [] if given is None else given
    if not isinstance(given, (list, tuple)) or not all(callable(each) for each in given):
        raise ValueError(f"stopping_criteria must be a list of stopping criteria, got {given!r}")
    if values.get("stop_strings") is not None and values.get("tokenizer") is None:
        raise ValueError("tokenizer must be given for stop_strings, got None")
    if values.get("stop_strings") is not None and not callable(getattr(values["tokenizer"], "get_vocab", None)):
        raise ValueError(f"tokenizer must be a tokenizer of transformers, got {values['tokenizer']!r}")
    asked = SimpleNamespace(**dict.fromkeys(FIELDS))
    asked.max_length = prompt_length + values["max_new_tokens"]
    asked.max_time = values.get("max_time")
    asked.stop_strings = values.get("stop_strings")
    eos = values.get("eos_token_id")
    asked._eos_token_tensor = torch.tensor(eos, device="cpu") if eos else None
    maker = GenerationMixin()
    maker.config = SimpleNamespace()
    return list(
        maker._get_stopping_criteria(
            generation_config=asked,
            stopping_criteria=kinds.StoppingCriteriaList(given),
            tokenizer=values.get("tokenizer"),
        )
    )
