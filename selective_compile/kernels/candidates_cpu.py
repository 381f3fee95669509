"""The candidates of top-k sampling on CPUs: the launcher of the C++ kernel beside this file, built when first used."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from selective_compile.kernels import native

_functions = native.Functions(__file__)
available, unavailable_reason = _functions.available, _functions.unavailable_reason

_pack = struct.Struct("=11q").pack


def top_candidates(scores: Tensor, kept: Sequence[int], temperatures: Sequence[float]) -> tuple[Tensor, Tensor] | None:
    """What `TemperatureLogitsWarper` and `TopKLogitsWarper` leave of each row [S, V], one candidate more than the most
    that a row keeps.

    Args:
        scores: stays as it is.
        kept: of each row, how many of the largest scaled scores stay; at least 1.

    Returns:
        In order of token id, the scaled scores [S, C], -inf where one goes, and their token ids [S, C]. None: there is
        no kernel for these scores, or more than C of a row are ties, or a score is not a number.
    """
    rows, vocabulary = scores.shape
    fits = scores.device.type == "cpu" and scores.dtype is torch.float32 and scores.stride(1) == 1
    if not fits or not rows or not available():
        return None
    count = min(max(kept) + 1, vocabulary)
    values, ids = scores.new_empty((rows, count)), scores.new_empty((rows, count), dtype=torch.int64)
    # Kept under names through the call.
    scales, counts = torch.tensor(temperatures, dtype=torch.float32), torch.tensor(kept, dtype=torch.int64)
    status = _functions["selective_candidates"](
        _pack(
            *(scores.data_ptr(), scales.data_ptr(), counts.data_ptr(), values.data_ptr(), ids.data_ptr()),
            *(rows, vocabulary, scores.stride(0), count, torch.get_num_threads(), native.torch_parallel()),
        )
    )
    return None if status else (values, ids)
