"""Progress of long work, told to whoever shows it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

Advance = Callable[[int], None]


class Stages(Protocol):
    """Called at the start of a stage of the work; the stage lasts while the result is entered."""

    def __call__(self, description: str, total: int | None = None) -> AbstractContextManager[Advance]:
        """`total` is how far `Advance` will go in all; None where that is not known."""


@contextmanager
def silent(description: str, total: int | None = None) -> Iterator[Advance]:
    """Stages that nobody watches."""
    yield lambda amount: None


class ProgressBars:
    """Stages as bars on a terminal, gone when they end; silent where the console is not a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def __call__(self, description: str, total: int | None = None) -> Iterator[Advance]:
        # Here, since work that nobody watches is done without it.
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        counted = (BarColumn(), MofNCompleteColumn()) if total is not None else ()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), *counted, TimeElapsedColumn())
        hidden = not self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=hidden) as progress:
            job = progress.add_task(description, total=total)
            yield lambda amount: progress.advance(job, amount)


def on_stderr() -> Stages:
    """Bars on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        return silent
    from rich.console import Console

    return ProgressBars(Console(stderr=True))
