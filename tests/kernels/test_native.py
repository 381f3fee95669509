"""Building, caching and loading native code, and the OpenMP runtime that it shares with torch."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from selective_compile.kernels import native, ragged_attention_cpu

SOURCE = 'extern "C" int answer() { return 42; }\n'

needs_compiler = pytest.mark.skipif(
    not ragged_attention_cpu.available(), reason=str(ragged_attention_cpu.unavailable_reason())
)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


@needs_compiler
def test_a_source_is_built_once_and_then_loaded(source, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    assert native.load(source, cache=cache).answer() == 42
    (library,) = cache.iterdir()

    def refuse(*_):
        raise AssertionError("built again")

    monkeypatch.setattr(native, "_build", refuse)
    assert native.load(source, cache=cache).answer() == 42
    assert [library] == list(cache.iterdir())


@needs_compiler
def test_a_library_that_was_cut_short_is_built_anew_and_not_loaded(source, tmp_path):
    """Loaded, it ended the process with a bus error, and every one behind it."""
    cache = tmp_path / "cache"
    native.load(source, cache=cache)
    (library,) = cache.iterdir()
    whole = library.read_bytes()
    library.unlink()  # this process has it in its memory
    library.write_bytes(whole[:4096])
    assert native.load(source, cache=cache).answer() == 42
    (again,) = cache.iterdir()
    assert again.read_bytes() == whole


@needs_compiler
def test_a_library_that_another_process_takes_away_is_built_anew(source, tmp_path, monkeypatch):
    """Both have found it cut short."""
    cache = tmp_path / "cache"
    native.load(source, cache=cache)
    read, taken = Path.read_bytes, []

    def taken_away(path):
        if not taken:
            taken.append(path)
            path.unlink()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", taken_away)
    assert native.load(source, cache=cache).answer() == 42
    assert taken == list(cache.iterdir())  # of the same compiler


@needs_compiler
@pytest.mark.parametrize("change", ("source", "flags", "processor"))
def test_what_the_code_depends_on_makes_another_library(change, source, tmp_path, monkeypatch):
    cache, flags = tmp_path / "cache", native.FLAGS
    native.load(source, cache=cache)
    if change == "source":
        source.write_text(SOURCE.replace("42", "43"))
    elif change == "flags":
        flags = (*native.FLAGS, "-DX")
    else:
        monkeypatch.setattr(native, "processor", lambda: "another")
    assert native.load(source, cache=cache, flags=flags).answer() == (43 if change == "source" else 42)
    assert len(list(cache.iterdir())) == 2


@needs_compiler
@pytest.mark.parametrize("changed", ("answer.h", "parts/deep.h"))
def test_what_an_included_file_says_makes_another_library(changed, source, tmp_path):
    cache = tmp_path / "cache"
    (tmp_path / "parts").mkdir()
    source.write_text('#include <cmath>\n#include "answer.h"\nextern "C" int answer() { return HIGH + LOW; }\n')
    (tmp_path / "answer.h").write_text('#pragma once\n  # include "parts/deep.h"\n#define HIGH 40\n')
    (tmp_path / "parts" / "deep.h").write_text('#pragma once\n#include "../answer.h"\n#define LOW 2\n')
    assert native.load(source, cache=cache).answer() == 42
    (tmp_path / changed).write_text((tmp_path / changed).read_text().replace("40", "50").replace("2", "7"))
    assert native.load(source, cache=cache).answer() == (52 if changed == "answer.h" else 47)
    assert native.load(source, cache=cache).answer() == (52 if changed == "answer.h" else 47)
    assert len(list(cache.iterdir())) == 2


@needs_compiler
def test_an_include_that_is_not_there_is_the_compilers_to_report(source, tmp_path):
    source.write_text('#include "nowhere.h"\n' + SOURCE)
    with pytest.raises(native.NativeBuildError, match="nowhere.h"):
        native.load(source, cache=tmp_path / "cache")


@needs_compiler
def test_concurrent_builds_leave_one_library(source, tmp_path):
    cache = tmp_path / "cache"
    program = (
        "import sys; from pathlib import Path; from selective_compile.kernels import native\n"
        "assert native.load(Path(sys.argv[1]), cache=Path(sys.argv[2])).answer() == 42"
    )
    command = [sys.executable, "-c", program, str(source), str(cache)]
    processes = [subprocess.Popen(command, cwd=Path(__file__).parents[2]) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert len(list(cache.iterdir())) == 1


@needs_compiler
def test_a_cache_that_cannot_be_used_is_done_without(source, tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    assert native.load(source, cache=blocked / "cache").answer() == 42


@needs_compiler
def test_a_full_disk_is_done_without(source, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr(native.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert native.load(source, cache=cache).answer() == 42
    assert list(cache.iterdir()) == []


@needs_compiler
def test_what_is_there_is_loaded_from_a_folder_for_reading_alone(source, tmp_path, monkeypatch):
    """As from a container's image: it is not even asked whether it can be written."""
    native.load(source, cache=tmp_path / "cache")
    monkeypatch.setattr(native, "_writable", None)
    assert native.load(source, cache=tmp_path / "cache").answer() == 42


def test_a_user_without_a_home_has_a_cache_folder_of_the_process(monkeypatch):
    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(native.Path, "home", none)
    folder = native.cache_folder()
    assert folder.is_dir() and folder == native.cache_folder() and folder.stat().st_mode & 0o077 == 0


def test_without_a_compiler_the_reason_names_those_looked_for(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.NativeBuildError, match=r"cannot build answer.cpp: c\+\+: not found; g\+\+: not found"):
        native.load(source, cache=tmp_path / "cache")


@needs_compiler
def test_a_failed_build_gives_the_compilers_words_and_leaves_nothing(source, tmp_path):
    source.write_text("this is no program")
    with pytest.raises(native.NativeBuildError, match="error: .*this"):
        native.load(source, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@needs_compiler
def test_a_broken_compiler_is_passed_over(source, tmp_path, monkeypatch):
    broken = tmp_path / "bin" / native.COMPILERS[0]
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho out of order >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")
    assert native.load(source, cache=tmp_path / "cache").answer() == 42


@needs_compiler
def test_an_interrupt_ends_a_build_and_the_next_who_asks_begins_it_anew(source, tmp_path, monkeypatch):
    """A terminal's Ctrl-C goes to the compiler, too: no other one begins, for which an exit would have to wait."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    interrupted = tmp_path / "bin" / native.COMPILERS[0]
    interrupted.parent.mkdir()
    interrupted.write_text('#!/bin/sh\n[ "$1" = --version ] || kill -INT $$\n')
    interrupted.chmod(interrupted.stat().st_mode | stat.S_IEXEC)
    functions = native.Functions(str(source.with_suffix(".py")))
    with monkeypatch.context() as patched:
        patched.setenv("PATH", f"{interrupted.parent}:{os.environ['PATH']}")
        assert "was interrupted" in (functions.unavailable_reason() or "")
        with pytest.raises(native.NativeBuildInterrupted, match="cannot build answer.cpp: .* was interrupted"):
            native.load(source)
    assert list((tmp_path / "cache" / "selective_compile").iterdir()) == []
    assert functions.available() and functions["answer"]() == 42


def test_an_unavailable_kernel_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = native.Functions(ragged_attention_cpu.__file__).unavailable_reason()
    assert reason is not None
    assert "cannot build ragged_attention_cpu.cpp" in reason


@needs_compiler
def test_it_is_built_beside_once_and_who_asks_meanwhile_waits_for_it(source, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build, begun, may_end, built = native._build, threading.Event(), threading.Event(), []

    def noted(compiler, source, *others):
        begun.set()
        assert may_end.wait(60)
        built.append(threading.current_thread().name)
        return build(compiler, source, *others)

    monkeypatch.setattr(native, "_build", noted)
    functions = native.Functions(str(source.with_suffix(".py")))
    functions.build_beside()
    assert begun.wait(60)  # and the caller is here all the same
    with ThreadPoolExecutor(2) as others:
        asked = [others.submit(functions.available) for _ in range(2)]
        may_end.set()
        assert all(each.result(60) for each in asked)
    assert functions["answer"]() == 42 and built == ["selective-native-build"]
    before = threading.active_count()
    functions.build_beside()
    assert threading.active_count() == before


def test_the_cache_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.cache_folder() == tmp_path / "selective_compile"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert native.cache_folder() == Path.home() / ".cache" / "selective_compile"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_threads_are_those_of_torchs_own_openmp_runtime():
    """One OpenMP runtime in the process after a parallel call, and the address that kernels call lies in it."""
    program = """
import torch
from selective_compile.kernels import native
from tests.kernels.ragged_cases import Case, make_inputs
from selective_compile.kernels import ragged_attention_cpu as cpu
torch.set_num_threads(2)
torch.ones(1 << 20).sum()
if cpu.available():
    cpu.ragged_attention(*make_inputs(Case(name="", requests=((300, 300),)), torch.float32).ragged())
address = native.torch_parallel()
runtimes, owner = set(), ""
for line in open("/proc/self/maps"):
    fields = line.split()
    begin, end = (int(x, 16) for x in fields[0].split("-"))
    if begin <= address < end:
        owner = fields[-1]
    if any(name in fields[-1] for name in ("libgomp", "libomp", "libiomp")):
        runtimes.add(fields[-1])
assert runtimes == {owner}, (runtimes, owner)
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root)


@needs_compiler
def test_the_library_brings_no_openmp_runtime_of_its_own():
    library = native.load(Path(ragged_attention_cpu.__file__).with_suffix(".cpp"))
    assert isinstance(library, ctypes.CDLL)
    content = Path(library._name).read_bytes()
    assert b"libgomp" not in content
    assert b"libomp" not in content
