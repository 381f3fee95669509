"""Draws of tokens on CPUs: the launchers of the C++ kernels beside this file, built when first used."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selective_compile.kernels import native

_functions = native.Functions(__file__)
available, unavailable_reason = _functions.available, _functions.unavailable_reason

_pack = struct.Struct("=9q").pack
_pack_uniform = struct.Struct("=4q").pack
_pack_wanted = struct.Struct("=ffdq").pack


def packed_warping(*, temperature: float, top_k: int, top_p: float, min_p: float) -> bytes:
    """What `draw_tokens` takes for a row; top_p 1.0 and min_p 0.0 are off, and the kernel must not see a top_k of 0."""
    largest = torch.finfo(torch.float32).max
    return _pack_wanted(temperature if temperature <= largest else math.inf, 1.0 - top_p, min_p, min(top_k, 2**63 - 1))


def draw_tokens(scores: Tensor, wanted: Sequence[bytes], fractions: NDArray[np.float64]) -> list[int] | None:
    """One token of each row [S, V], drawn from what transformers' warpers leave of it.

    Args:
        scores: stays as it is.
        wanted: of each row, as `packed_warping` has it.
        fractions: [S] in [0, 1), which part of the sum of the probabilities, in order of token id, a row is drawn at.

    Returns:
        -1 for a row with no token left; None: there is no kernel for these scores.
    """
    rows, vocabulary = scores.shape
    fits = scores.device.type == "cpu" and scores.dtype is torch.float32 and vocabulary and scores.stride(1) == 1
    if not fits or not available():
        return None
    ids = array("q", bytes(8 * rows))
    every = array("b", b"".join(wanted))
    _functions["selective_draw"](
        _pack(
            *(scores.data_ptr(), every.buffer_info()[0], fractions.ctypes.data, ids.buffer_info()[0]),
            *(rows, vocabulary, scores.stride(0), torch.get_num_threads(), native.torch_parallel()),
        )
    )
    return ids.tolist()


def uniform(seeds: Sequence[int], indices: Sequence[int]) -> NDArray[np.float64] | None:
    """[S] numbers in [0, 1), those of `runtime.philox.uniform`; None: no kernel can be built here."""
    if not available():
        return None
    keys, counters, fractions = array("Q", seeds), array("Q", indices), np.empty(len(seeds))
    addresses = keys.buffer_info()[0], counters.buffer_info()[0], fractions.ctypes.data
    _functions["selective_uniform"](_pack_uniform(*addresses, len(seeds)))
    return fractions
