"""What every test gets: Dynamo without the graphs of the tests before it, and GPU tests only where there is a GPU."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# The same examples in every run, so that a commit's tests end alike wherever and whenever they run. Others are tried by
# `pytest --hypothesis-profile explore`, with as many examples as before or, by a test's own settings, as it says.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("fixed")

# Pytest gives every logger that hands nothing on a handler of its own. With any handler on this one torch writes down
# all that it traces and compiles, graph after graph, as with TORCH_TRACE: a fifth of the time, and nobody reads it.
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True)
def own_graphs() -> Iterator[None]:
    """Dynamo counts recompiles per code object, which all models share, and runs eagerly past its limit."""
    yield
    torch._dynamo.reset()


def pytest_collection_finish() -> None:
    """Each collection would look at a million objects of torch and transformers: a sixth of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # native modules count what is left of theirs at exit


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA or ROCm device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
