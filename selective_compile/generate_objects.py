"""The processors and criteria of one call of `generate`, for each of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from transformers import MaxLengthCriteria

from selective_compile.runtime.grammar import GRAMMARS
from selective_compile.runtime.own_code import copied

NEGATIVE = ("negative_prompt_ids", "negative_prompt_attention_mask")
OBJECTS = (
    *("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "tokenizer", "assistant_model"),
    *NEGATIVE,
)


@dataclass(frozen=True, kw_only=True)
class CallObjects:
    """What a call brings beside fields, as `model.generate` takes it."""

    logits_processor: Any
    stopping_criteria: Any
    prefix_allowed_tokens_fn: Any
    tokenizer: Any
    negative_prompt_ids: Any
    negative_prompt_attention_mask: Any
    assistant_model: Any
    structure: Mapping[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> CallObjects:
        """Of all that is given by name."""
        structure = {name: given[name] for name in GRAMMARS if name in given}
        return cls(**{name: given.get(name) for name in OBJECTS}, structure=structure)

    def options(self, row: int, rows: int, padding: int, beams: int, *, told: int) -> dict[str, Any]:
        """For one of the rows, which has so much `padding`, as options of `Engine.submit`; `told`: the number that
        `prefix_allowed_tokens_fn` gets.

        A single row gets the objects themselves. Several rows get a copy each, since every row is a request of its
        own and an object that counts its calls, or keeps what it saw, must not see those of other rows.

        Raises:
            ValueError: an object for several rows cannot be copied, or there are not as many negative prompts as rows.
        """
        found = {"logits_processor": self.logits_processor, "stopping_criteria": self.stopping_criteria}
        if rows > 1:
            found = {name: copied(name, objects) for name, objects in found.items()}
        if padding and isinstance(self.stopping_criteria, (list, tuple)):
            found["stopping_criteria"] = [_without_padding(each, padding) for each in found["stopping_criteria"]]
        allowed = self.prefix_allowed_tokens_fn
        return {
            **found,
            "prefix_allowed_tokens_fn": partial(_for_row, allowed, told) if callable(allowed) else allowed,
            "tokenizer": self.tokenizer,
            "assistant_model": self.assistant_model,
            **self.structure,
            **{name: _rows_of(name, getattr(self, name), row, rows, beams) for name in NEGATIVE},
        }


def _rows_of(name: str, given: Any, row: int, rows: int, beams: int) -> Any:
    """What there is of one row of a call: a row for it, or for each of its beams, as `generate` has rows by then."""
    if given is None:
        return None
    several = isinstance(given, (Tensor, list, tuple))
    if not several or len(given) not in (rows, rows * beams):
        found = f"{len(given)} rows" if several else repr(given)
        raise ValueError(f"{name} must be one for each of the {rows} rows of input_ids, got {found}")
    return given[row] if len(given) == rows else given[row * beams : (row + 1) * beams]


def _without_padding(criterion: Any, padding: int) -> Any:
    """A length counts the columns of the call."""
    return MaxLengthCriteria(criterion.max_length - padding) if type(criterion) is MaxLengthCriteria else criterion


def _for_row(allowed: Any, told: int, _: int, ids: Any) -> Any:
    """Of a request by itself the number is always 0; the function is to get that in the call."""
    return allowed(told, ids)
