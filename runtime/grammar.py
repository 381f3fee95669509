"""Structured output: a JSON schema, a regular expression or a grammar that a request's tokens must follow.

llguidance computes which tokens may come next. Chosen by measured time, one core, a vocabulary of 26,000 and a JSON
schema of five fields: its masks took 7 microseconds in the median and 27 in the mean, its grammar 2 milliseconds to
compile; xgrammar's 2 and 293 microseconds, and 40 milliseconds; outlines-core needs the whole automaton first.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessor

from selective_compile.kernels.penalties_cpu import forbid_tokens
from selective_compile.runtime.own_code import Failed, attempt

# Loaded on first use: on a machine without it, an engine serves all requests but those with a grammar.
if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GRAMMARS = ("json_schema", "regex", "grammar")
NONE_LEFT = "no token is left that follows the grammar and may come by the other options"


class GrammarProcessor(LogitsProcessor):
    """Leaves the tokens that the text so far can go on with; the end of sequence where it may end."""

    def __init__(self, matcher: LLMatcher, *, prompt_length: int, vocab_size: int) -> None:
        self._matcher = matcher
        self._read = prompt_length
        self.words = -(-vocab_size // 32)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] with -inf for what cannot come after the tokens [1, length].

        Raises:
            ValueError: a token of the request does not follow the grammar, or none is left that does.
        """
        bits = np.zeros((1, self.words), dtype=np.int32)
        self.fill(input_ids[0].tolist(), bits.ctypes.data)
        left = scores.masked_fill(_forbidden(bits, scores), -torch.inf)
        if bool(left.isneginf().all()):
            raise ValueError(NONE_LEFT)
        return left

    def fill(self, tokens: Sequence[int], address: int) -> None:
        """Have the 32-bit words [words] at an address say what can come after the tokens so far, a bit each.

        Raises:
            ValueError: a token does not follow the grammar.
        """
        for token in tokens[self._read :]:
            self._matcher.consume_token(token)
        self._read = len(tokens)
        self._matcher.unsafe_compute_mask_ptr(address, 4 * self.words)
        if self._matcher.is_error():
            raise ValueError(f"tokens must follow the grammar: {self._matcher.get_error()}")


def mask(
    scores: Tensor, grammars: Sequence[GrammarProcessor | None], histories: Sequence[Sequence[int]]
) -> dict[int, str]:
    """Write -inf to scores [S, V] where a row's grammar does not go on; the rows for which that failed, and how.

    Args:
        grammars: of each row; None: it has none.
        histories: of each row, its request's tokens so far, the prompt included.
    """
    rows = [row for row, grammar in enumerate(grammars) if grammar is not None]
    if not rows:
        return {}
    bits = np.zeros((len(rows), -(-scores.shape[1] // 32)), dtype=np.int32)
    start, width = bits.ctypes.data, bits.strides[0]
    errors = {}
    for place, row in enumerate(rows):
        grammar = grammars[row]
        assert grammar is not None and grammar.words == bits.shape[1], (scores.shape, grammar)
        asked = attempt("logits processors", partial(grammar.fill, histories[row], start + place * width))
        if isinstance(asked, Failed):
            errors[row] = asked.error
    if not forbid_tokens(scores, rows, bits):
        scores[rows] = scores[rows].masked_fill_(_forbidden(bits, scores), -torch.inf)
    return errors


def _forbidden(bits: NDArray[np.int32], scores: Tensor) -> Tensor:
    """[R, V] bool on the device of the scores, of bits [R, words]."""
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, : scores.shape[1]]
    return torch.from_numpy(allowed == 0).to(scores.device)


class Grammars:
    """Makes processors; keeps what it prepared of each tokenizer for as long as the tokenizer lives."""

    def __init__(self) -> None:
        self._prepared: WeakKeyDictionary[Any, dict[Any, LLTokenizer]] = WeakKeyDictionary()

    def processor(self, values: Mapping[str, Any], *, prompt_length: int, vocab_size: int) -> GrammarProcessor | None:
        """For the one of `GRAMMARS` that a request asks for; None: it asks for none.

        Raises:
            ValueError: it asks for several, for one that is none, or without a tokenizer or an end of sequence; or
                llguidance is not installed.
        """
        asked = [name for name in GRAMMARS if values.get(name) is not None]
        if not asked:
            return None
        if len(asked) > 1:
            raise ValueError(f"{asked[0]} must be None beside {asked[1]}, got both")
        (name,) = asked
        if importlib.util.find_spec("llguidance") is None:
            raise ValueError(f"llguidance must be installed for {name}: pip install llguidance")
        from llguidance import LLMatcher

        if not values.get("eos_token_id"):
            raise ValueError(f"eos_token_id must be set for {name}, got None")
        tokenizer = self._tokenizer(name, values.get("tokenizer"), vocab_size, values["eos_token_id"])
        source = _source(name, values[name])
        matcher = LLMatcher(tokenizer, source, log_level=0)
        if matcher.is_error():
            raise ValueError(f"{name} must be one that can be compiled, got {matcher.get_error()}")
        return GrammarProcessor(matcher, prompt_length=prompt_length, vocab_size=vocab_size)

    def _tokenizer(self, name: str, tokenizer: Any, vocab_size: int, eos: Sequence[int]) -> LLTokenizer:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"tokenizer must be a fast tokenizer for {name}, got {type(tokenizer).__name__}")
        prepared = self._prepared.setdefault(tokenizer, {})
        key = (vocab_size, tuple(eos))
        if key not in prepared:
            import llguidance.hf

            prepared[key] = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos))
        return prepared[key]


def _source(name: str, value: Any) -> str:
    """The grammar in llguidance's own form."""
    from llguidance import LLMatcher

    if name == "json_schema":
        if not isinstance(value, (str, dict)):
            raise ValueError(f"json_schema must be a dictionary or a string, got {value!r}")
        try:
            read = json.loads(value) if isinstance(value, str) else value
            return LLMatcher.grammar_from_json_schema(json.dumps(read))
        except (TypeError, ValueError) as error:
            raise ValueError(f"json_schema must be JSON, got {value!r}: {error}") from error
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a string that is not empty, got {value!r}")
    return LLMatcher.grammar_from_regex(value) if name == "regex" else LLMatcher.grammar_from_lark(value)
