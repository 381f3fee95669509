"""A pytest plugin for transformers' own tests: their `model.generate` is counted, and served by `sc.generate`.

Loaded with `-p through_engine` into a pytest that runs in a checkout of transformers, whose package `tests` takes the
name of ours: so this imports nothing from there, and `run.py` beside it starts that pytest.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

import selective_compile as sc

# Inductor would compile a graph for each of hundreds of models; what it compiles has tests of its own.
MIXIN = "GenerationTesterMixin"
CONFIG = sc.EngineConfig(compile=False, max_requests=32)


class Recorder:
    """What the tests came to.

    Attributes:
        serve: the tests' calls go to `sc.generate`; False: they are only counted.
    """

    def __init__(self, serve: bool) -> None:
        self.serve = serve
        self.results: dict[str, dict[str, Any]] = {}
        self._calls = 0
        self._refusals: list[str] = []
        self._inside = False
        self._generate = GenerationMixin.generate

    @contextmanager
    def patched(self) -> Iterator[None]:
        recorder = self

        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            return recorder.call(model, args, kwargs)

        generate.__signature__ = inspect.signature(self._generate)  # type: ignore[attr-defined]
        GenerationMixin.generate = generate
        try:
            yield
        finally:
            GenerationMixin.generate = self._generate

    def call(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a test, or one that serving it makes, such as of an assistant; that is transformers' own."""
        if self._inside:
            return self._generate(model, *args, **kwargs)
        self._calls += 1
        self._inside = True
        try:
            if not self.serve:
                return self._generate(model, *args, **kwargs)
            return sc.generate(model, *args, engine_config=CONFIG, **kwargs)
        except ValueError as error:
            self._refusals.append(str(error))
            raise
        finally:
            self._inside = False

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Of a model's tests those of generation, overridden or not; of other files all."""
        others = [item for item in items if not of_generation(item)]
        items[:] = [item for item in items if of_generation(item)]
        config.hook.pytest_deselected(items=others)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            outcome = report.outcome
            reason = str(report.longrepr[-1]) if outcome == "skipped" and isinstance(report.longrepr, tuple) else ""
            if outcome == "failed" and call.excinfo is not None:
                refused = self._refusals and str(call.excinfo.value) == self._refusals[-1]
                outcome = "refused" if refused else "failed"
                reason = f"{call.excinfo.typename}: {call.excinfo.value}"
            self.results[item.nodeid] = {"outcome": outcome, "calls": self._calls, "reason": first_line(reason)}
            self._calls, self._refusals = 0, []
            torch._dynamo.reset()
        return report


def of_generation(item: pytest.Item) -> bool:
    mixins = [each for each in getattr(getattr(item, "cls", None), "__mro__", ()) if each.__name__ == MIXIN]
    return not mixins and "generation" in item.path.parts or any(hasattr(each, item.name) for each in mixins)


def first_line(reason: str) -> str:
    return reason.strip().split("\n")[0][:300]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--serve", action="store_true", help="serve the tests' calls of generate by sc.generate")
    parser.addoption("--results", required=True, help="where to write what the tests came to")


def pytest_configure(config: pytest.Config) -> None:
    recorder = Recorder(config.getoption("--serve"))
    config.pluginmanager.register(recorder, "recorder")
    patched = recorder.patched()
    patched.__enter__()
    config.add_cleanup(lambda: patched.__exit__(None, None, None))


def pytest_unconfigure(config: pytest.Config) -> None:
    recorder = config.pluginmanager.get_plugin("recorder")
    if recorder is not None:
        Path(config.getoption("--results")).write_text(json.dumps(recorder.results, indent=1))
