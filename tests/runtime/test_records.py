"""Log probabilities of rows are those of each by itself, however many there are."""

from __future__ import annotations

import torch

from selective_compile.runtime import records
from selective_compile.runtime.records import logprobs_of


def test_rows_are_computed_some_at_a_time(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Those of a prompt come to gigabytes in float32."""
    torch.manual_seed(0)
    logits, tokens = torch.randn(75, 203, dtype=torch.bfloat16), [7 * place % 203 for place in range(75)]
    asked: list[int] = []
    whole = records._log_softmax

    def noted(rows: torch.Tensor) -> torch.Tensor:
        asked.append(len(rows))
        return whole(rows)

    monkeypatch.setattr(records, "_log_softmax", noted)
    found = logprobs_of(logits, tokens)
    assert sum(asked) == 75 and max(asked) == records.AT_A_TIME
    assert found == [logprobs_of(row[None], [token])[0] for row, token in zip(logits, tokens, strict=True)]
