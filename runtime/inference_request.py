"""What a server hands to the batch manager, request by request."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig

from selective_compile.options import integer_of
from selective_compile.runtime.request_state import RequestId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class InferenceRequest:
    """What `get_requests` returns a list of.

    Attributes:
        request_id: a string or an integer that no request has whose final response is still to come.
        input_ids: as for `Engine.submit`.
        generation_config: as for `Engine.submit`.
        streaming: a response for each token, in place of one at the end. A beam search has all tokens at its end.
        pad_id: fills up the rows of sequences that are shorter than others of the request.
        options: other arguments of `Engine.submit`, such as `logprobs`, `priority` or `max_new_tokens`.
    """

    request_id: RequestId
    input_ids: Any
    generation_config: GenerationConfig | None = None
    streaming: bool = False
    pad_id: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


def requests_among(given: Iterable[Any]) -> Iterator[InferenceRequest]:
    """Those that are requests; of others the log tells."""
    for each in given:
        if isinstance(each, InferenceRequest):
            yield each
        else:
            logger.error("get_requests must give InferenceRequests, got %r", each)


def with_all_beams(wanted: InferenceRequest) -> dict[str, Any]:
    """Its options; where it has beams and does not say how many of them to return, all.

    Raises:
        ValueError: what fills up rows is no token id.
    """
    pad_id = wanted.pad_id
    found = integer_of(pad_id)
    if found is None or not -(2**63) <= found < 2**63:
        raise ValueError(f"pad_id must be an integer of 64 bits, got {pad_id!r}")
    config, options = wanted.generation_config, dict(wanted.options)
    beams = options.get("num_beams", getattr(config, "num_beams", None))
    said = "num_return_sequences" in options or getattr(config, "num_return_sequences", None) is not None
    if (integer_of(beams) or 0) > 1 and not said:
        options["num_return_sequences"] = beams
    return options
