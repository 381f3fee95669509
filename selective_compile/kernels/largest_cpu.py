"""The largest score of each row on CPUs: the launcher of the C++ kernel beside this file, built when first used.

`torch.argmax` compares one score after another, which for 32 rows of a vocabulary of 32,000 takes a millisecond.
"""

from __future__ import annotations

import struct
from array import array

import torch
from torch import Tensor

from selective_compile.kernels import native

_functions = native.Functions(__file__)
available, unavailable_reason = _functions.available, _functions.unavailable_reason

_pack = struct.Struct("=8q").pack
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def largest(scores: Tensor) -> list[int]:
    """``scores.argmax(dim=-1).tolist()`` of scores [S, V]; by that, where there is no kernel for them."""
    rows, vocabulary = scores.shape
    fits = scores.device.type == "cpu" and scores.dtype in _DTYPES and vocabulary and scores.stride(1) == 1
    if not fits or not available():
        return scores.argmax(dim=-1).tolist()
    ids = array("q", bytes(8 * rows))
    _functions["selective_largest"](
        _pack(
            *(scores.data_ptr(), ids.buffer_info()[0], rows, vocabulary, scores.stride(0), _DTYPES[scores.dtype]),
            *(torch.get_num_threads(), native.torch_parallel()),
        )
    )
    return ids.tolist()
