"""What Inductor asks the machine for when it is first used, asked while a model is still being traced, or known before.

It finds out which vectors a CPU has by loading a library for each kind in a process of its own, a second in all, in
each process that compiles anything; Triton reads all of itself, hundreds of megabytes, to know what it has compiled
before.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

from selective_compile.forks import lock_of_any_process
from selective_compile.kept_files import attempt, own_folder
from selective_compile.kernels.native import compiler_version, processor

_ASKING: dict[str, threading.Thread] = {}
_LOCK = lock_of_any_process()


def ask(device: torch.device) -> None:
    """Begin to, in threads of their own, once in a process; errors are left to who needs the answer."""
    _begin("triton", _read_triton)
    if device.type == "cpu":
        _begin("vectors", _find_vectors)


def answers(device: torch.device) -> dict[str, Any]:
    """Settings of Inductor for a graph on ``device``, by which it need not ask again."""
    with _LOCK:
        asking = list(_ASKING.values())
    for thread in asking:
        thread.join()
    if device.type != "cpu" or config.cpp.vec_isa_ok is not None:
        return {}
    if not vectors_are_known():
        with config.patch({"cpp.vec_isa_ok": True}):
            every = valid_vec_isa_list.__wrapped__()
        if list(map(str, every)) != list(map(str, valid_vec_isa_list())):
            return {}
        with attempt("keep which vectors the processor has"):
            _file_of_vectors().touch()
    return {"cpp.vec_isa_ok": True}


def _begin(name: str, question: Callable[[], None]) -> None:
    with _LOCK:
        if name not in _ASKING:
            thread = threading.Thread(target=_quietly, args=(question,), daemon=True)
            with contextlib.suppress(RuntimeError):  # the process may have as many threads as it can
                thread.start()
                _ASKING[name] = thread


def vectors_are_known() -> bool:
    """Whether an earlier start has found that the compiler and torch have all the vectors that the processor has; not
    where the user says what of them Inductor is to take for granted."""
    if config.cpp.vec_isa_ok is not None:
        return False
    known = False
    with attempt("look up which vectors the processor has"):
        known = _file_of_vectors().exists()
    return known


def _file_of_vectors() -> Path:
    return own_folder() / f"vectors-{_machine(get_cpp_compiler())}"


@functools.cache
def _machine(compiler: str) -> str:
    told = torch.__version__, torch.__file__, shutil.which(compiler), compiler_version(compiler), processor()
    return hashlib.sha256(repr(told).encode()).hexdigest()[:24]


def _find_vectors() -> None:
    with config.patch({"cpp.vec_isa_ok": True} if vectors_are_known() else {}):  # of this thread alone
        valid_vec_isa_list()


def _read_triton() -> None:
    from triton.runtime.cache import triton_key  # there may be no Triton

    triton_key()


def _quietly(question: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        question()
