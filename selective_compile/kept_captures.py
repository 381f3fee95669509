"""Captures on disk, so that a second start of a model does not trace it again: Dynamo takes seconds for many layers.

A kept capture is taken only where it is proved to be that of the live model.  The file's name has what the model is
made of, the versions and this package's own code; and the digest of every operator that the model's Python asks for in
a run without data (`operators_of`).  In the file are the source files of the code that was traced, and the attributes
that it read, which must all be as they were.  What cannot be told, as a tensor of the code's own, is not kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import marshal
import os
import pickle
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import torch
from torch import nn

from selective_compile.capture import CANNOT, Captured, capture, check
from selective_compile.kernels.native import cache_folder
from selective_compile.live_settings import LiveSettings, Read
from selective_compile.operators_seen import all_tensors_of, kind_of, operators_of
from selective_compile.packed_graph import PackedGraph, packed, unpacked

MOST = 64  # files, of half a megabyte for 32 layers; the oldest go
ENDING = ".capture"
SWITCH = "SELECTIVE_COMPILE_KEEP_CAPTURES"  # of the environment: "0" neither takes kept captures nor keeps any
GENERATED = "<string>"  # where dataclasses put the methods that they write
# And what files raise that are broken, or of which something is gone.
FAILURES = (*CANNOT, OSError, EOFError, ImportError, ArithmeticError, AssertionError, pickle.PickleError)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    graph: PackedGraph
    names: frozenset[str]
    keys: frozenset[str]
    code: tuple[bytes, ...]
    files: dict[str, str]
    settings: tuple[str, ...]


def capture_once(model: nn.Module) -> Captured:
    """As `capture`, which an earlier process may have done; what this one does is kept.

    Raises:
        ValueError, RefusedError: as `capture`.
    """
    check(model)
    if os.environ.get(SWITCH) == "0":
        return capture(model)
    folder, parts = cache_folder() / "captures", ""
    with attempt("look for a kept capture"):
        parts = parts_of(model)
        if any(folder.glob(f"{parts}-*{ENDING}")):
            file = folder / f"{parts}-{operators_of(model)}{ENDING}"
            if file.exists() and (found := loaded(file, model)) is not None:
                return found
    captured = capture(model)
    if parts:
        with attempt("keep a capture"):
            save(captured, model, folder, parts)
    return captured


@contextlib.contextmanager
def attempt(to: str) -> Iterator[None]:
    """Where it fails, as a model's code may on fake tensors, the model is captured, and that is all."""
    try:
        yield
    except FAILURES as error:
        _logger.info("could not %s: %s: %s", to, type(error).__name__, error)


def loaded(file: Path, model: nn.Module) -> Captured | None:
    """None if the code that was traced, or what it read, is not as it was."""
    kept: Kept = pickle.loads(file.read_bytes())
    if any(digest_of(Path(path)) != known for path, known in kept.files.items()):
        return None
    read = Read(names=kept.names, keys=kept.keys, code=frozenset(map(marshal.loads, kept.code)))
    if LiveSettings(model, read).told() != kept.settings:
        return None
    file.touch()
    return unpacked(kept.graph, model, read)


def save(captured: Captured, model: nn.Module, folder: Path, parts: str) -> None:
    read = captured.read
    kept = Kept(
        graph=packed(captured, model),
        names=read.names,
        keys=read.keys,
        code=tuple(map(marshal.dumps, read.code)),
        files={path: digest_of(Path(path)) for path in source_files(read.code)},
        settings=LiveSettings(model, read).told(),
    )
    data = pickle.dumps(kept)
    unpacked(pickle.loads(data).graph, model, read)  # what cannot be made again is not kept
    file = folder / f"{parts}-{operators_of(model)}{ENDING}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as written:
        try:
            written.write(data)
            written.close()
            os.replace(written.name, file)
        except BaseException:
            os.unlink(written.name)
            raise
    for old in sorted(folder.glob(f"*{ENDING}"), key=lambda path: path.stat().st_mtime)[:-MOST]:
        old.unlink(missing_ok=True)


def source_files(codes: Iterable[CodeType]) -> set[str]:
    """Raises ValueError for code of which there is no file, as of a notebook."""
    found = {code.co_filename for code in codes if not code.co_filename.startswith("<frozen ")}
    found.discard(GENERATED)
    missing = sorted(path for path in found if not Path(path).is_file())
    if missing:
        raise ValueError(f"code must come from files, got {missing[0]}")
    return found


def parts_of(model: nn.Module) -> str:
    """A digest of what a model is made of and of everything beside it that a capture could depend on."""
    told = [f"{path} {kind.__module__}.{kind.__qualname__}" for path, kind in kinds_of(model)]
    told += [f"{name} {type(tensor).__name__} {kind_of(tensor)}" for name, tensor in all_tensors_of(model)]
    told += [torch.__version__, sys.version, platform.machine(), own_code()]
    told += [str(torch.get_default_dtype()), str(torch.get_default_device())]
    told += [str(torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:32]


def kinds_of(model: nn.Module) -> list[tuple[str, type]]:
    return [(path, type(module)) for path, module in model.named_modules(remove_duplicate=False)]


@functools.cache
def own_code() -> str:
    """Of this package: what a graph is made to be may change with it."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    folders = os.walk(root, followlinks=True)  # in a checkout two of its folders are links
    for path in sorted(Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py")):
        digest.update(f"{path.relative_to(root)} {digest_of(path)}\n".encode())
    return digest.hexdigest()


def digest_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
