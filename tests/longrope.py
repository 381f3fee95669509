"""Models that rotate by other frequencies where a request is longer than some number of tokens."""

from __future__ import annotations

from typing import Any

import torch

from tests.models import tiny


def longrope(original: int, family: str = "phi3", **changes: Any) -> Any:
    """As those of long context: other frequencies beyond ``original`` tokens, which their first call makes, and each
    call writes those that it takes into a buffer."""
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": original}
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0 + 3 * pair for pair in range(8)]}
    if family == "phi3":
        parameters |= {"partial_rotary_factor": 1.0}
        changes |= {"original_max_position_embeddings": original}
    if family == "phimoe":
        parameters |= {"short_mscale": 1.0, "long_mscale": 1.7}
    model = tiny(
        family,
        num_hidden_layers=2,
        max_position_embeddings=4096,
        rope_parameters={**parameters, **factors},
        **changes,
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.3)
    return model
