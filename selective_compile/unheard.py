"""What PyTorch logs of attempts that may fail, or of what is none of a user's business, meanwhile is not heard."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unheard(logger: logging.Logger) -> Iterator[None]:
    """Each use has a filter of its own, as several may go on at once."""
    of_nobody = logging.Filter("nobody")
    logger.addFilter(of_nobody)
    try:
        yield
    finally:
        logger.removeFilter(of_nobody)
