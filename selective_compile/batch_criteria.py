"""Stopping criteria that come as objects with a tensor of several rows, and may tell these apart: asked about all rows
at once behind each token of theirs, as transformers' loop asks them.

Rows are requests by themselves all the same.  One that has more tokens by then than the criteria were asked about loses
those behind its end, as if it had stopped there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import StoppingCriteriaList

from selective_compile.runtime.request import Request
from selective_compile.runtime.request_result import RequestResult


class BatchCriteria:
    """Of one call.

    Args:
        criteria: get the token ids of all rows [B, S + n], those of the prompts as they came, and None for scores.
        columns: [B, S] int64, the prompts as they came.
        pad: what a row that has ended has from then on.
    """

    def __init__(self, criteria: Sequence[Any], columns: Tensor, pad: int) -> None:
        self._criteria = StoppingCriteriaList(criteria)
        self._ids, self._pad = columns, pad
        self._lengths: list[int | None] = [None] * len(columns)  # of the rows that they ended

    def read(self, requests: Sequence[Request], streams: Sequence[Iterator[int]]) -> None:
        """Ask about the requests' tokens, which ``streams`` give as they come, until all have ended.

        Raises:
            What a criterion, or a stream, raises.
        """
        for count, tokens in enumerate(itertools.zip_longest(*streams), start=1):
            going = [token is not None and ended is None for token, ended in zip(tokens, self._lengths, strict=True)]
            if not any(going):
                return
            done = self._done([token if goes else self._pad for token, goes in zip(tokens, going, strict=True)])
            for row, request in enumerate(requests):
                if going[row] and done[row]:
                    self._lengths[row] = count
                    request.cancel()

    def result_of(self, row: int, result: RequestResult) -> RequestResult:
        """The result without what is behind the end."""
        length = self._lengths[row]
        return result if length is None else replace(result, tokens=result.tokens[:length], finish_reason="stop")

    def _done(self, tokens: Sequence[int | None]) -> list[bool]:
        """Which rows have ended, of which each has one more token."""
        column = torch.tensor(tokens, dtype=self._ids.dtype, device=self._ids.device)[:, None]
        self._ids = torch.cat([self._ids, column], dim=1)
        done: list[bool] = self._criteria(self._ids, None).tolist()
        return done
