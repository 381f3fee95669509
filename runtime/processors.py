"""The logits processors of a request: transformers' own list, and which of it runs on all rows at once.

`GenerationMixin._get_logits_processor` is asked for the list, so that which processors a configuration asks for, and
in which order, is transformers' own answer. The longest end of the list whose processors all have a vectorised twin is
read off into numbers; whatever stands before it runs as the objects that it is, on its request's row alone.
"""

from __future__ import annotations

import functools
import inspect
import math
from array import array
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as kinds

from selective_compile.runtime.generation_fields import FIELDS
from selective_compile.runtime.grammar import GrammarProcessor
from selective_compile.runtime.own_code import Copied

# In the order in which they are applied to all rows at once, which is that of transformers. The warpers are read off
# for sampling only, since greedy decoding has them only where a user passes them.
PENALTIES = (
    kinds.RepetitionPenaltyLogitsProcessor,
    kinds.MinLengthLogitsProcessor,
    kinds.MinNewTokensLengthLogitsProcessor,
    kinds.SuppressTokensLogitsProcessor,
    kinds.SuppressTokensAtBeginLogitsProcessor,
)
WARPERS = (
    kinds.TemperatureLogitsWarper,
    kinds.TopKLogitsWarper,
    kinds.TopPLogitsWarper,
    kinds.MinPLogitsWarper,
)


class Ban(NamedTuple):
    """Tokens that cannot come while the sequence, its prompt included, has a length of first .. before - 1."""

    tokens: array[int]
    first: int
    before: float


class _Maker(GenerationMixin):
    """Stands for the model where transformers makes the list: guidance calls it, the others look at its vocabulary."""

    def __init__(self, model: Any, vocab_size: int) -> None:
        self._model = model
        self.vocab_size = vocab_size
        text = SimpleNamespace(vocab_size=vocab_size)
        self.config = SimpleNamespace(is_encoder_decoder=False, get_text_config=lambda: text)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)


class RowProcessors:
    """Runs a request's processors, which may keep a state, once for each of its tokens in turn."""

    def __init__(self, processors: Sequence[Any], device: torch.device) -> None:
        """
        Raises:
            ValueError: one takes more than ids and scores, which `generate` has no more to give than that.
        """
        for each in processors:
            # Now and not at each token, as transformers' own list does it: it takes longer than most processors.
            own = each.copy if isinstance(each, Copied) else each
            names = list(inspect.signature(own.__call__).parameters)
            if len(names) > 2:
                raise ValueError(
                    f"logits_processor must be called with ids and scores, got {type(own).__name__} of {names}"
                )
        self.processors = tuple(processors)
        self._device = device

    @torch.no_grad()
    def __call__(self, history: Sequence[int], scores: Tensor) -> Tensor:
        """The processed row [1, V] for the tokens so far and their scores [1, V].

        Raises:
            ValueError: a processor gave something else than a row; and whatever a processor raises.
        """
        return self.run(torch.from_numpy(np.array(history, dtype=np.int64))[None].to(self._device), scores)

    @torch.no_grad()
    def run(self, ids: Tensor, scores: Tensor) -> Tensor:
        """As above for the rows of all beams of a request: ids [N, length], scores [N, V]."""
        found: Any = scores
        for each in self.processors:
            found = each(ids, found)
        if not isinstance(found, Tensor) or found.shape != scores.shape:
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"logits processors must give scores of shape {list(scores.shape)}, got {got}")
        if found.layout is not torch.strided or found.is_meta:
            raise ValueError(f"logits processors must give plain scores, got {found.layout} on {found.device}")
        return found


def row_processors(
    values: Mapping[str, Any],
    prompt: Sequence[int],
    grammar: GrammarProcessor | None,
    *,
    vocab_size: int,
    device: torch.device,
    model: Any,
) -> tuple[RowProcessors | None, dict[str, Any]]:
    """The objects to run on the request's own row, and the fields of `GenerationParams` for the rest.

    Args:
        values: the request's fields, checked; `max_new_tokens` is resolved.
        grammar: comes behind the processors of the user, and before what only sampling has.
        model: what guidance calls, with the request's tokens or its negative prompt.

    Raises:
        ValueError: a value that the processor does not take.
    """
    every = _list_of_transformers(values, prompt, grammar, _Maker(model, vocab_size), device)
    if values["num_beams"] > 1:
        return (RowProcessors(every, device) if every else None), _read_off([], len(prompt), vocab_size)
    order: tuple[type, ...] = (*PENALTIES, GrammarProcessor, *(WARPERS if values["do_sample"] else ()))
    start = len(every)
    above = len(order)
    while start and (rank := _rank(every[start - 1], order)) is not None and rank < above:
        above, start = rank, start - 1
    objects = RowProcessors(every[:start], device) if start else None
    return objects, _read_off(every[start:], len(prompt), vocab_size)


def _list_of_transformers(
    values: Mapping[str, Any],
    prompt: Sequence[int],
    grammar: LogitsProcessor | None,
    maker: _Maker,
    device: torch.device,
) -> list[Any]:
    """As `generate` makes it for this request alone."""
    asked = SimpleNamespace(**{**dict.fromkeys(FIELDS), **{name: values.get(name) for name in FIELDS}})
    length = len(prompt)
    if asked.encoder_no_repeat_ngram_size:  # the processor makes as many lists, and of more tokens there are no n-grams
        asked.encoder_no_repeat_ngram_size = min(asked.encoder_no_repeat_ngram_size, length + 1)
    asked.max_length = length + values["max_new_tokens"]
    if asked.min_new_tokens is not None:
        asked.min_length = length + asked.min_new_tokens
    eos = values.get("eos_token_id")
    asked._eos_token_tensor = torch.tensor(eos, device=device) if eos else None
    if asked.exponential_decay_length_penalty is not None and not eos:
        raise ValueError("eos_token_id must be set for exponential_decay_length_penalty, got None")
    found = maker._get_logits_processor(
        generation_config=asked,
        input_ids_seq_length=length,
        encoder_input_ids=torch.tensor(prompt, dtype=torch.int64, device=device)[None],
        prefix_allowed_tokens_fn=_callable_or_none("prefix_allowed_tokens_fn", values),
        logits_processor=LogitsProcessorList([*_listed("logits_processor", values), *([grammar] if grammar else [])]),
        device=device,
        model_kwargs={},
        negative_prompt_ids=_row_for_each_beam("negative_prompt_ids", values, device),
        negative_prompt_attention_mask=_row_for_each_beam("negative_prompt_attention_mask", values, device),
    )
    _refuse_foreign_tokens(found, maker.vocab_size)
    return list(found)


@functools.cache
def samples_have_one_number() -> bool:
    """Whether `generate` tells a `prefix_allowed_tokens_fn` of all samples the number of their prompt.

    transformers 5.17 tells it that of the row.
    """
    values: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 2, "max_new_tokens": 1}
    values["prefix_allowed_tokens_fn"] = lambda *_: [0]
    (made,) = _list_of_transformers(values, [0], None, _Maker(None, 1), torch.device("cpu"))
    return bool(made._num_beams == 2)


def _rank(processor: Any, order: Sequence[type]) -> int | None:
    """Its place in the order; None: it is none of them, or not as transformers makes it from a field."""
    # Compared exactly: a class derived from one of these does something else.
    if type(processor) not in order:
        return None
    usual = (
        getattr(processor, "filter_value", -math.inf) == -math.inf
        and getattr(processor, "min_tokens_to_keep", 1) == 1
        and getattr(processor, "prompt_ignore_length", None) is None
    )
    return order.index(type(processor)) if usual else None


def _read_off(processors: Sequence[Any], prompt_length: int, vocab_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    bans: list[Ban] = []
    for each in processors:
        match each:
            case kinds.RepetitionPenaltyLogitsProcessor():
                found["repetition_penalty"] = each.penalty
            case kinds.MinLengthLogitsProcessor():
                bans.append(Ban(_array(each.eos_token_id), 0, each.min_length))
            case kinds.MinNewTokensLengthLogitsProcessor():
                bans.append(Ban(_array(each.eos_token_id), 0, each.prompt_length_to_skip + each.min_new_tokens))
            case kinds.SuppressTokensLogitsProcessor():
                bans.append(Ban(_array(each.suppress_tokens), 0, math.inf))
            case kinds.SuppressTokensAtBeginLogitsProcessor():
                bans.append(Ban(_array(each.begin_suppress_tokens), each.begin_index, each.begin_index + 1))
            case GrammarProcessor():
                found["grammar"] = each
            case kinds.TemperatureLogitsWarper():
                found["temperature"] = each.temperature
            case kinds.TopKLogitsWarper():
                found["top_k"] = each.top_k
            case kinds.TopPLogitsWarper():
                found["top_p"] = each.top_p
            case kinds.MinPLogitsWarper():
                found["min_p"] = each.min_p
    # What can never apply to this request has no place in its steps.
    known = [ban._replace(tokens=_below(vocab_size, ban.tokens)) for ban in bans if ban.before > prompt_length]
    return {**found, "bans": tuple(ban for ban in known if ban.tokens)}


def _array(tokens: Tensor) -> array[int]:
    # -1, as some configurations have it for no token, would be the last of the vocabulary.
    return array("q", [token for token in tokens.reshape(-1).tolist() if token >= 0])


def _below(vocab_size: int, tokens: array[int]) -> array[int]:
    return array("q", [token for token in tokens if token < vocab_size])


def _refuse_foreign_tokens(processors: Sequence[Any], vocab_size: int) -> None:
    """Now, and not with the request's first token, where transformers would find it."""
    for each in processors:
        match each:
            case kinds.NoBadWordsLogitsProcessor():
                name, ids = "bad_words_ids", [token for word in each.sequence_bias for token in word]
            case kinds.SequenceBiasLogitsProcessor():
                name, ids = "sequence_bias", [token for word in each.sequence_bias for token in word]
            case kinds.ForcedBOSTokenLogitsProcessor():
                name, ids = "forced_bos_token_id", [each.bos_token_id]
            case kinds.ForcedEOSTokenLogitsProcessor():
                name, ids = "forced_eos_token_id", each.eos_token_id.tolist()
            case _:
                continue
        wrong = [token for token in ids if token >= vocab_size]
        if wrong:
            raise ValueError(f"{name} must be token ids less than the vocabulary size {vocab_size}, got {wrong[0]}")


def _listed(name: str, values: Mapping[str, Any]) -> LogitsProcessorList:
    given = values.get(name)
    found = [] if given is None else given
    if not isinstance(found, (list, tuple)) or not all(callable(each) for each in found):
        raise ValueError(f"{name} must be a list of logits processors, got {given!r}")
    return LogitsProcessorList(found)


def _row_for_each_beam(name: str, values: Mapping[str, Any], device: torch.device) -> Tensor | None:
    """[num_beams, S], of a sequence, an array or a tensor [S], [1, S] or of that shape."""
    given, beams = values.get(name), values["num_beams"]
    if given is None:
        return None
    try:
        found = torch.as_tensor(given, dtype=torch.int64, device=device)
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0, dtype=torch.float32, device="cpu")
    found = found[None] if found.dim() == 1 else found
    if found.dim() != 2 or found.shape[0] not in (1, beams) or not found.shape[1]:
        raise ValueError(f"{name} must be integers in one dimension, at least one, or {beams} such rows, got {given!r}")
    return found.expand(beams, -1)


def _callable_or_none(name: str, values: Mapping[str, Any]) -> Any:
    given = values.get(name)
    if given is not None and not callable(given):
        raise ValueError(f"{name} must be a function of a row's number and its token ids, got {given!r}")
    return given
