"""Build a C++ source file with a plain C interface into a shared library, once per machine, and load it.

No header of torch or Python is used: a build takes seconds, and the library works with every version of both.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from selective_compile.forks import lock_of_any_process

_logger = logging.getLogger(__name__)

COMPILERS = ("c++", "g++", "clang++")
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"\n]+)"', re.MULTILINE)

# Whether kernels use matrix units for bfloat16, where the processor has them (`matrix_unit_cpu.h`).
MATRIX_UNIT = True

# No -ffast-math: masked scores are infinite, and a NaN of the model must stay one.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-fno-math-errno", "-w")


class NativeBuildError(RuntimeError):
    """There is no C++ compiler, or none that is there can build the source; the message has what each one said."""


class NativeBuildInterrupted(NativeBuildError):
    """Ctrl-C, which a terminal sends to compilers, too: says nothing of whether it can be built."""


ROOM = 2**23  # bytes that must be free where a library is built: one has at most a few of 2**20
ENDING = sysconfig.get_config_var("SHLIB_SUFFIX") or ".so"
INTERRUPTED = (-signal.SIGINT, 128 + signal.SIGINT)  # exit statuses, the second of a script around a compiler


def load(source: Path, *, cache: Path | None = None, flags: tuple[str, ...] = FLAGS) -> ctypes.CDLL:
    """The library built from `source`: from the cache folder, or else built into it first.

    Raises:
        NativeBuildError: it cannot be built or loaded here.
    """
    failures = []
    for name in COMPILERS:
        compiler = shutil.which(name)
        if compiler is None:
            failures.append(f"{name}: not found")
            continue
        try:
            return _load_with(compiler, source, cache or cache_folder(), flags)
        except (OSError, subprocess.CalledProcessError) as error:
            if getattr(error, "returncode", 0) in INTERRUPTED:  # and no other compiler is to begin
                raise NativeBuildInterrupted(f"cannot build {source.name}: {compiler} was interrupted") from error
            said = getattr(error, "stderr", None) or str(error)
            failures.append(f"{compiler}: {said.strip()[-2000:]}")
    raise NativeBuildError(f"cannot build {source.name}: " + "; ".join(failures))


class Functions:
    """The C functions of the source file beside a launcher, built when first asked for.

    Each takes the address of its packed arguments.
    """

    def __init__(self, launcher: str) -> None:
        """`launcher`: the Python file."""
        self._source = Path(launcher).with_suffix(".cpp")
        self._functions: dict[str, Any] = {}
        self._lock = lock_of_any_process()
        self._built: ctypes.CDLL | NativeBuildError | None = None

    def __getitem__(self, name: str) -> Any:
        """
        Raises:
            NativeBuildError: the library cannot be built here.
        """
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = getattr(self._library(), name)
            # A bytes object passes as its address; without argtypes ctypes skips a conversion.
            function.argtypes = None
        return function

    def address(self, name: str) -> int:
        """Where a function is in memory.

        Raises:
            NativeBuildError: the library cannot be built here.
        """
        return ctypes.cast(self[name], ctypes.c_void_p).value or 0

    def available(self) -> bool:
        """Whether the kernels can run here; `unavailable_reason` says why not."""
        return self.unavailable_reason() is None

    def unavailable_reason(self) -> str | None:
        """Why the kernels cannot be built here, with the compiler's message, or None."""
        built = self._once()
        return str(built) if isinstance(built, NativeBuildError) else None

    def build_beside(self) -> None:
        """Have it built in a thread of its own, if it is not, while the caller goes on: Dynamo traces in one thread."""
        if self._built is None:
            threading.Thread(target=self.available, name="selective-native-build").start()

    def _library(self) -> ctypes.CDLL:
        built = self._once()
        if isinstance(built, NativeBuildError):
            raise NativeBuildError(str(built))
        return built

    def _once(self) -> ctypes.CDLL | NativeBuildError:
        """Whoever asks while another thread builds it waits for that."""
        with self._lock:
            if self._built is None:
                try:
                    self._built = load(self._source)
                except NativeBuildInterrupted as error:
                    return error
                except NativeBuildError as error:
                    _logger.warning("%s", error)
                    self._built = error
            return self._built


def _load_with(compiler: str, source: Path, cache: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    key = library_key(compiler, source, flags)
    for library in cache.glob(f"{key}-*{ENDING}"):  # in a folder that may be for reading alone, as an image's
        with contextlib.suppress(OSError):  # another process may take it away meanwhile
            if library.name == library_name(key, library.read_bytes()):
                return ctypes.CDLL(str(library))
        with contextlib.suppress(OSError):  # what has been cut short would end the process that loads it
            library.unlink()
    with _writable(cache) as folder:
        return ctypes.CDLL(str(_build(compiler, source, folder, key, flags)))


def _build(compiler: str, source: Path, folder: Path, key: str, flags: tuple[str, ...]) -> Path:
    _logger.info("building %s with %s", source.name, compiler)
    # Under a name of its own, then renamed: another process may be building the same library at this moment.
    descriptor, name = tempfile.mkstemp(prefix=key, suffix=".unfinished", dir=folder)
    os.close(descriptor)
    unfinished = Path(name)
    try:
        _output([compiler, *flags, str(source), "-o", name])
        return unfinished.replace(folder / library_name(key, unfinished.read_bytes()))
    finally:
        unfinished.unlink(missing_ok=True)


def _output(command: list[str]) -> str:
    """Raises CalledProcessError, with what it printed, if it fails."""
    return subprocess.run(
        command, check=True, capture_output=True, text=True, encoding="utf-8", errors="replace"
    ).stdout


def library_key(compiler: str, source: Path, flags: tuple[str, ...] = FLAGS) -> str:
    """Names everything that the machine code depends on; -march=native makes the processor one of these."""
    parts = (*_texts(source), *flags, compiler, compiler_version(compiler), processor())
    told = "\0".join(parts)
    return f"{source.stem}-{_digest(told.encode())}"


def library_name(key: str, code: bytes) -> str:
    """What is in the file is told by its name, so that one which is not as it was written is known by it."""
    return f"{key}-{_digest(code)}{ENDING}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def compiler_version(compiler: str) -> str:
    return _output([compiler, "--version"])


def _texts(source: Path) -> list[str]:
    """What `source` says, and what the files that it includes in quotes say, and those that these include."""
    paths, texts = [source.resolve()], []
    for path in paths:  # grows on the way
        texts.append(path.read_text(encoding="utf-8"))
        included = [(path.parent / name).resolve() for name in _INCLUDE.findall(texts[-1])]
        # One that lies elsewhere on the compiler's search path is part of the compiler.
        paths += [file for file in included if file not in paths and file.exists()]
    return texts


def processor() -> str:
    """What tells this processor's instruction set from another's; a cache folder may be shared by machines."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        kept = ("flags", "Features", "model name", "CPU part")
        return "\n".join(sorted({line for line in lines if line.startswith(kept)}))
    return f"{platform.machine()} {platform.processor()} {platform.node()}"


def cache_folder() -> Path:
    """Where libraries are kept: the user's cache folder, as the XDG base directory specification places it; of a user
    without a home, as in containers, a temporary one for as long as the process runs."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "selective_compile"
    except RuntimeError:
        return Path(_folder_of_process().name)


@functools.cache
def _folder_of_process() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="selective_compile-", ignore_cleanup_errors=True)


@contextlib.contextmanager
def _writable(cache: Path) -> Iterator[Path]:
    """The cache folder; where it cannot be written, a temporary one. A loaded library outlives its file."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        writable = os.access(cache, os.W_OK) and shutil.disk_usage(cache).free >= ROOM
    except OSError:
        writable = False
    if writable:
        yield cache
        return
    with tempfile.TemporaryDirectory(prefix="selective_compile-") as folder:
        yield Path(folder)


@functools.cache
def torch_parallel() -> int:
    """The address of GOMP_parallel in the OpenMP runtime that torch itself runs on; 0 if torch runs without one.

    GNU's runtime has it, and so have LLVM's and Intel's. Looked up through torch's own library and its dependencies:
    linked by name, a kernel could bring a second runtime into the process, whose threads fight torch's for the cores.
    """
    try:
        entry = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        _logger.warning("torch's OpenMP runtime was not found: native kernels run on one thread")
        return 0
    return ctypes.cast(entry, ctypes.c_void_p).value or 0
