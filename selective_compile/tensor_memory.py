"""The memory that a tensor lies in, looked at as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from selective_compile.tensor_state import class_of

WORD = 8  # bytes that are compared, or added up, at once


@contextmanager
def as_it_is() -> Iterator[None]:
    """Tensors are looked at also where a run is traced, and nothing is recorded of it."""
    with _disable_current_modes(), torch.no_grad():
        yield


def is_plain(tensor: Tensor) -> bool:
    """Whether it is no more than numbers that lie in some memory."""
    return class_of(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"


def memory_of(tensor: Tensor) -> int | None:
    """What tells the memory that it lies in, if it is a plain one that lies in any."""
    if not is_plain(tensor) or tensor.is_quantized or tensor.is_nested:
        return None
    storage = tensor.untyped_storage()
    return int(storage._cdata) if storage.nbytes() else None


def bytes_of(tensor: Tensor) -> range:
    """From its first to its last, in its memory."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.itemsize
    return range(start, start + (last + 1) * tensor.itemsize if tensor.numel() else start)


def words_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Int64 and uint8, in the same memory as a tensor that has one, of which the first has up to a word more at either
    end, and the second what of the memory's end is none."""
    own, storage = bytes_of(tensor), tensor.untyped_storage()
    words = storage.nbytes() // WORD
    first, end = min(own.start // WORD, words), min(-(-own.stop // WORD), words)
    rest = range(max(words * WORD, own.start), max(words * WORD, own.stop))
    of_words = torch.empty(0, dtype=torch.int64, device=tensor.device).set_(storage, first, (end - first,), (1,))
    of_rest = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, rest.start, (len(rest),), (1,))
    return of_words, of_rest


def same_bytes(one: Tensor, other: Tensor) -> bool | None:
    """NaN is what it is, too.  None: it cannot be looked at."""
    if not (is_plain(one) and is_plain(other)) or one.is_nested or one.dtype != other.dtype or one.shape != other.shape:
        return None
    if one.is_quantized:
        one, other = one.int_repr(), other.int_repr()
    try:
        every = [each.resolve_conj().resolve_neg().reshape(-1).contiguous() for each in (one, other)]
        every = [each.view(torch.uint8) for each in every]
    except torch.OutOfMemoryError:
        raise
    except (NotImplementedError, RuntimeError):  # as four bits
        return None
    if all(each.storage_offset() % WORD == len(each) % WORD == 0 for each in every):
        every = [each.view(torch.int64) for each in every]
    return torch.equal(*every)
