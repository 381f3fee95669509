"""What the responses of the batch manager carry: the sequences of a request as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from selective_compile.runtime.request import Request


class Part(NamedTuple):
    """What a response has of one sequence: tokens, and of each its log probability and row [V] if they are kept."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    logits: Sequence[Tensor]


@dataclass(kw_only=True)
class OpenRequest:
    """A request whose last response has not been sent.

    Attributes:
        handle: the first of its samples.
        streaming: there is a response for each step that gives it a token, with what is new.
        pad_id: stands in `output_ids` behind sequences that are shorter than others.
        sent: of each sequence the tokens that are in responses, and the sum of their log probabilities.
        sent_prompt: whether the logits of the prompt are.
    """

    handle: Request
    streaming: bool
    pad_id: int
    sent: list[tuple[int, float]] = field(default_factory=list)
    sent_prompt: bool = False

    def __post_init__(self) -> None:
        beams = self.handle.params.beams
        self.sent = [(0, 0.0)] * (len(self.handle.samples) if beams is None else beams.num_return_sequences)

    @property
    def ended(self) -> bool:
        return all(sample.finished for sample in self.handle.samples)

    @property
    def error(self) -> str | None:
        """Why one of its samples failed."""
        return next((sample.error for sample in self.handle.samples if sample.error is not None), None)

    def cancel(self) -> None:
        for sample in self.handle.samples:
            sample.cancel()

    def tensors(self, *, ended: bool) -> dict[str, Tensor] | None:
        """The next response, as `BatchManager` describes it; None: nothing is to be sent yet.

        ``ended``: what `ended` was; it may end meanwhile, and this is not the last response then.
        """
        if not (self.streaming or ended):
            return None
        parts = self._parts(ended)
        if not (ended or any(part.tokens for part in parts)):
            return None
        self.sent = [
            (count + len(part.tokens), total + sum(part.logprobs))
            for (count, total), part in zip(self.sent, parts, strict=True)
        ]
        return self._ids(parts) | self._logprobs(parts) | self._context_logits() | self._generation_logits(parts)

    def _ids(self, parts: Sequence[Part]) -> dict[str, Tensor]:
        prompt = self.handle.prompt_ids
        before = [] if self.streaming else prompt
        rows = [torch.tensor([*before, *part.tokens], dtype=torch.int64, device="cpu") for part in parts]
        lengths = [len(prompt) + count for count, _ in self.sent]
        return {"output_ids": _padded(rows, self.pad_id), "sequence_length": torch.tensor([lengths], device="cpu")}

    def _logprobs(self, parts: Sequence[Part]) -> dict[str, Tensor]:
        if not self.handle.params.logprobs:
            return {}
        rows = [torch.tensor(part.logprobs, dtype=torch.float32, device="cpu") for part in parts]
        totals = torch.tensor([[total for _, total in self.sent]], dtype=torch.float32, device="cpu")
        return {"log_probs": _padded(rows, 0.0), "cum_log_probs": totals}

    def _context_logits(self) -> dict[str, Tensor]:
        pieces = self.handle.prompt_logits
        if self.sent_prompt or not pieces:
            return {}
        self.sent_prompt = True
        return {"context_logits": torch.cat(pieces)[None].cpu()}

    def _generation_logits(self, parts: Sequence[Part]) -> dict[str, Tensor]:
        some = next((part.logits[0] for part in parts if part.logits), None)
        if some is None:
            return {}
        rows = [torch.stack([*part.logits]) if part.logits else some.new_empty(0, len(some)) for part in parts]
        return {"generation_logits": _padded(rows, 0.0).cpu()}

    def _parts(self, ended: bool) -> list[Part]:
        """What has come of each sequence since the last response; nothing of a search that has not ended."""
        handle = self.handle
        if handle.params.beams is None:
            return [_part(sample, count) for sample, (count, _) in zip(handle.samples, self.sent, strict=True)]
        result = handle.searched if ended else None
        if result is None:
            return [Part((), (), ()) for _ in self.sent]
        return [
            Part(
                found.tokens,
                found.logprobs or (),
                [rows[beam] for rows, beam in zip(result.logits or (), found.beam_indices, strict=False)],
            )
            for found in result.hypotheses
        ]


def _part(sample: Request, count: int) -> Part:
    tokens, records = sample.since(count)
    logprobs = [record.logprob for record in records if record.logprob is not None]
    return Part(tokens, logprobs, [record.logits for record in records if record.logits is not None])


def _padded(rows: list[Tensor], value: float) -> Tensor:
    """[1, N, longest, ...] of N tensors [length, ...]."""
    return pad_sequence(rows, batch_first=True, padding_value=value)[None]
