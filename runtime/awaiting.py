"""Coroutines that wait for a change which a thread makes: what wakes each of them in its own event loop."""

from __future__ import annotations

import asyncio


class Awaiting:
    """Those that wait for one change. The lock of what changes is held when it is called."""

    __slots__ = ("_changes",)

    def __init__(self) -> None:
        self._changes: list[asyncio.Future[None]] = []

    def change(self) -> asyncio.Future[None]:
        """To be awaited, without the lock, by the coroutine that calls this."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes.append(change)
        return change

    def wake(self) -> None:
        """All of them, from any thread. A loop that has been closed meanwhile has nobody who waits."""
        if not self._changes:  # mostly: it is asked with each token
            return
        changes, self._changes = self._changes, []
        for change in changes:
            try:
                change.get_loop().call_soon_threadsafe(_come, change)
            except RuntimeError:
                if not change.get_loop().is_closed():
                    raise


def _come(change: asyncio.Future[None]) -> None:
    if not change.done():  # the coroutine may have been cancelled
        change.set_result(None)
