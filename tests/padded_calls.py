"""One padded batch, other paddings of it, and how far a compiled model's logits are from the model's on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.exactness import fast, greatest, logits_of, padded_batch

IDS, MASK = padded_batch(97)
REAL = MASK.bool()


def difference(
    model: nn.Module, *calls: tuple[Tensor, dict[str, Any]], real: Tensor | None = None, **options: Any
) -> float:
    compiled, worst = fast(model, **options), 0.0
    with torch.no_grad():
        for ids, arguments in calls:
            given = logits_of(compiled(ids, **arguments)) - logits_of(model(ids, **arguments))
            rows = arguments.get("attention_mask") if real is None else real
            worst = max(worst, greatest(given if rows is None else given[rows.bool()]))
    return worst


HOLES = MASK.clone()
HOLES[3, 5:9] = 0
EMPTY_ROW = MASK.clone()
EMPTY_ROW[1] = 0
ALONE = torch.zeros_like(MASK)
ALONE[1, 4] = 1
