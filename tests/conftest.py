"""What every test gets: Dynamo without the graphs of the tests before it, and GPU tests only where there is a GPU."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from selective_compile import kept_files
from tests.durations import DurationRecorder, left_to_a_long_run, long_files_first, recorded
from tests.kernels.compiled_before import COMPILED_BEFORE, Recorder
from tests.sampled import take_turns

# The same examples in every run, so that a commit's tests end alike wherever and whenever they run. Others are tried by
# `pytest --hypothesis-profile explore`, with as many examples as before or, by a test's own settings, as it says.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("fixed")

# Pytest gives every logger that hands nothing on a handler of its own. With any handler on this one torch writes down
# all that it traces and compiles, graph after graph, as with TORCH_TRACE: a fifth of the time, and nobody reads it.
logging.getLogger("torch.__trace").propagate = True

# Models here are small and each is traced once: to remember what every operator made of fake tensors took a fifth of
# the time of tests that trace. Of large models it takes about what it saves, and the package leaves it as it is.
torch._dynamo.config.fake_tensor_cache_enabled = False

# What a shell starts in the background ignores Ctrl-C, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    every = "with all values of what is `sampled`: for every change of a kernel, of its tiles, or of Triton"
    parser.addoption("--exhaustive", action="store_true", help=every)
    record = "write down what kernels took that were compiled ahead of time, of the test files that run"
    parser.addoption("--record-compiled", action="store_true", help=record)
    short = "of each test function as many combinations as its share of the time has room for, by durations.json"
    parser.addoption("--short", action="store_true", help=short)
    parser.addoption("--record-durations", action="store_true", help="write down how long the tests of a run take")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-compiled"):
        config.pluginmanager.register(Recorder(COMPILED_BEFORE))
    if config.getoption("--record-durations") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(DurationRecorder())


@pytest.fixture(scope="session")
def folder_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all worker processes of a run, and of no other run."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "kept"


@pytest.fixture(autouse=True)
def kept_in_run(folder_of_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test has captured another need not: a half of the time that an engine of a small model takes."""
    monkeypatch.setattr(kept_files, "cache_folder", lambda: folder_of_run)
    monkeypatch.setattr(kept_files, "MOST", 10_000)


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    take_turns(config, items)
    durations = recorded()
    if config.getoption("--short"):
        left = left_to_a_long_run(items, durations)
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=list(left))
    long_files_first(items, durations)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA or ROCm device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
