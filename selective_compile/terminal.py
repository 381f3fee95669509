"""What a command shows of its work, and what it does not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from selective_compile.interrupts import ending_at_once

if TYPE_CHECKING:
    from rich.console import Console

    from selective_compile.progress import ProgressBars


def check_file(option: str, path: Path | None) -> None:
    """Raises ValueError where nothing can be written there; before the work that would be lost. None: not asked for."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"{option} must lie in a folder that exists, got {str(path)!r}")
    if path is not None and path.is_dir():
        raise ValueError(f"{option} must be a file, got the folder {str(path)!r}")


def begin(threads: int | None = None) -> tuple[ProgressBars, Console]:
    """Bars on standard error, text on standard output; transformers, which has bars of its own, is silenced.

    threads: of torch; None: as many as it takes.
    """
    with ending_at_once():
        import transformers

        from selective_compile.progress import ProgressBars
        from selective_compile.tables import console

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    return ProgressBars(console(stderr=True)), console()
