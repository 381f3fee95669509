"""Copies of blocks between the pools of a device and those of the host's memory, where they lie in other order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from selective_compile.runtime.device_stream import DeviceStream, Work

# What is copied while the host puts what came before, or what comes next, where it belongs.
TURNS = 2


def copy_blocks(
    stream: DeviceStream, pools: Iterable[tuple[Tensor, Tensor]], *, to_host: bool, blocks: Tensor, slots: Tensor
) -> None:
    """All are there when this returns.

    Args:
        pools: of the device [blocks, ...], each with that of the host [slots, ...].
        blocks: [count] int64, on the device.
        slots: [count] int64, on the host.
    """
    begin = _to_host if to_host else _to_device
    on_their_way: deque[Callable[[], None]] = deque()
    for pool, host in pools:
        if len(on_their_way) == TURNS:  # or the host would take memory for all of them
            on_their_way.popleft()()
        put = begin(stream, pool, host, blocks, slots)
        on_their_way.append(partial(_end, stream.mark(), put))
    for end in on_their_way:
        end()


def _end(wait: Work, put: Work) -> None:
    wait()
    put()


def _to_host(stream: DeviceStream, pool: Tensor, host: Tensor, blocks: Tensor, slots: Tensor) -> Work:
    if not stream.separate:  # all of it is the host's memory
        return lambda: host.index_put_((slots,), pool[blocks])
    staged = _staged(host, slots)
    stream.enqueue(lambda: staged.copy_(pool[blocks], non_blocking=True))
    return lambda: host.index_put_((slots,), staged)


def _to_device(stream: DeviceStream, pool: Tensor, host: Tensor, blocks: Tensor, slots: Tensor) -> Work:
    staged = _staged(host, slots)
    torch.index_select(host, 0, slots, out=staged)
    stream.enqueue(lambda: pool.index_put_((blocks,), staged.to(pool.device, non_blocking=True)))
    return lambda: None


def _staged(host: Tensor, slots: Tensor) -> Tensor:
    """Pinned as the host's pools are: from other memory and to it, a copy would be made in parts, and waited for."""
    return torch.empty(len(slots), *host.shape[1:], dtype=host.dtype, pin_memory=host.is_pinned(), device="cpu")
