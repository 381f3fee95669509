"""Penalties, bans and grammars on rows of scores on CPUs: the launchers of the C++ kernels beside this file."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selective_compile.kernels import native

_functions = native.Functions(__file__)
available, unavailable_reason = _functions.available, _functions.unavailable_reason

_pack = struct.Struct("=8q").pack
_pack_tokens = struct.Struct("=qqqd").pack
_pack_grammars = struct.Struct("=9q").pack


class Penalised(NamedTuple):
    """The tokens of a row, int64, with a penalty of repetition; a token may be there again."""

    row: int
    tokens: array[int]
    penalty: float


class Banned(NamedTuple):
    """Tokens, int64, that cannot come in a row."""

    row: int
    tokens: array[int]


def penalise_tokens(scores: Tensor, penalties: Sequence[Penalised], bans: Sequence[Banned]) -> bool:
    """Change scores [S, V] in place: penalties of repetition first, then -inf for what is banned.

    Args:
        penalties: at most one of each row.

    Returns:
        whether there is a kernel for these scores, else they are as they were.

    Raises:
        IndexError: a token is not of the vocabulary.
    """
    if not _fits(scores):
        return False
    tokens = [_pack_tokens(row, *ids.buffer_info(), penalty) for row, ids, penalty in penalties]
    tokens += [_pack_tokens(row, *ids.buffer_info(), 0.0) for row, ids in bans]
    every = array("b", b"".join(tokens))
    failed = _functions["selective_penalise"](
        _pack(
            *(scores.data_ptr(), every.buffer_info()[0], len(penalties), len(tokens), scores.shape[1]),
            *(scores.stride(0), torch.get_num_threads(), native.torch_parallel()),
        )
    )
    if failed:
        raise IndexError(f"tokens with a penalty or a ban must be less than the vocabulary size {scores.shape[1]}")
    return True


def forbid_tokens(scores: Tensor, rows: Sequence[int], bits: NDArray[np.int32]) -> bool:
    """Write -inf to rows of scores [S, V] for each token whose bit is 0 in bits [R, ceil(V / 32)], the lowest first.

    Returns:
        whether there is a kernel for these scores, else they are as they were.
    """
    if not _fits(scores):
        return False
    places = array("q", rows)
    _functions["selective_forbid"](
        _pack_grammars(
            *(scores.data_ptr(), places.buffer_info()[0], bits.ctypes.data, *bits.shape, scores.shape[1]),
            *(scores.stride(0), torch.get_num_threads(), native.torch_parallel()),
        )
    )
    return True


def _fits(scores: Tensor) -> bool:
    return scores.device.type == "cpu" and scores.dtype is torch.float32 and scores.stride(1) == 1 and available()
