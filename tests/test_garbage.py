"""While much is made, what was there before is not looked through; nothing is lost by that."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator

import pytest

import selective_compile as sc
from selective_compile import programs
from selective_compile.garbage import only_new_garbage
from tests.models import tiny


class Loop:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _nothing_is_frozen() -> Iterator[None]:
    gc.unfreeze()  # all tests together keep what was there before them
    yield
    assert gc.get_freeze_count() == 0
    gc.freeze()


def test_what_was_there_before_waits_and_what_is_made_is_found() -> None:
    old = weakref.ref(Loop())
    with only_new_garbage():
        new = weakref.ref(Loop())
        gc.collect()
        assert old() is not None and new() is None
    gc.collect()
    assert old() is None


def test_engines_and_imports_are_made_within(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []

    def noted(*_: object, **__: object) -> None:
        frozen.append(gc.get_freeze_count() > 0)
        raise InterruptedError

    monkeypatch.setattr(programs, "prove", noted)
    with pytest.raises(InterruptedError):
        programs.compile_step_program(tiny("llama", num_hidden_layers=1), sc.EngineConfig(compile=False))
    monkeypatch.setattr("selective_compile.importlib.import_module", noted)
    with pytest.raises(InterruptedError):
        sc.__getattr__("Engine")
    assert frozen == [True, True]


def test_an_interrupt_leaves_nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    freeze = gc.freeze

    def interrupted() -> None:
        freeze()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(gc, "freeze", interrupted)
        with only_new_garbage():
            pass
    assert gc.get_freeze_count() == 0


def test_one_within_another() -> None:
    with only_new_garbage():
        between = weakref.ref(Loop())
        with pytest.raises(RuntimeError), only_new_garbage():
            raise RuntimeError
        gc.collect()
        assert between() is not None and gc.get_freeze_count()
    gc.collect()
    assert between() is None


def test_threads_that_are_within_at_once() -> None:
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with only_new_garbage():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(10)
    with only_new_garbage():
        pass
    assert gc.get_freeze_count()
    leave.set()
    thread.join()


def test_what_somebody_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with only_new_garbage():
            new = [Loop() for _ in range(10)]
            assert gc.get_freeze_count() <= frozen
        assert 0 < gc.get_freeze_count() <= frozen and new
    finally:
        gc.unfreeze()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_process_that_was_forked_within_is_not_within() -> None:
    with only_new_garbage():
        child = os.fork()
        if not child:
            lost = weakref.ref(Loop())
            gc.collect()
            with only_new_garbage():
                pass
            os._exit(0 if lost() is None and gc.get_freeze_count() == 0 else 1)
        assert os.waitpid(child, 0)[1] == 0 and gc.get_freeze_count()
