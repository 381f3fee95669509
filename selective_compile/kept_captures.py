"""Captures on disk, so that a second start of a model does not trace it again: Dynamo takes seconds for many layers.

It is kept only where a run of the captured graph without data asks for the same operators as one of the model's Python
does (`fake_run`), and taken only where the live model's does, and where it gives the live model's logits on a few
tokens: code may ask for a type, which without data is another.  The file's name has their digest, and what the model is
made of, the versions and this package's own code.  In the file are the source files of the code that was traced, and
the attributes that it read, which must all be as they were.  What cannot be told, as a tensor of the code's own, is not
kept.

Only where `EngineConfig.keep_captures` asks for it: the run is of a copy of the model, but what a model's code keeps
elsewhere, as tables in a global or in a `functools.lru_cache`, would be left without data.
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

from selective_compile.capture import Captured, capture, check
from selective_compile.fake_run import Seen, operators_of, operators_of_graph
from selective_compile.kernels.native import cache_folder
from selective_compile.live_settings import LiveSettings, Read
from selective_compile.operators_seen import all_tensors_of, kind_of
from selective_compile.packed_graph import PackedGraph, packed, unpacked
from selective_compile.same_logits import gives_logits_of

MOST = 64  # files, of half a megabyte for 32 layers; the oldest go
ENDING = ".capture"
CHECKSUM = hashlib.sha256().digest_size  # bytes in front of a file's own
UNFINISHED = "unfinished-"
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
    parts, seen = "", None
    with attempt("look for a kept capture"):
        folder, parts = own_folder(), parts_of(model)
        if any(folder.glob(f"{parts}-*{ENDING}")):
            seen = operators_of(model)
            file = folder / f"{parts}-{seen.digest}{ENDING}"
            if file.exists() and (found := loaded(file, model)) is not None:
                return found
    captured = capture(model)
    if parts:
        with attempt("keep a capture"):
            save(captured, model, own_folder(), parts, seen)
    return captured


@contextlib.contextmanager
def attempt(to: str) -> Iterator[None]:
    """Where it fails the model is captured, and that is all."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a model's code may raise anything on fake tensors
        _logger.info("could not %s: %s: %s", to, type(error).__name__, error)


def own_folder() -> Path:
    """Raises ValueError for one that others can write to: what is in it is run."""
    folder = cache_folder() / "captures"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise ValueError(f"a folder of captures must be writable by its user alone, got {folder}")
    return folder


def loaded(file: Path, model: nn.Module) -> Captured | None:
    """None if the code that was traced, or what it read, is not as it was, or its logits are not the model's."""
    written = file.read_bytes()
    data = written[CHECKSUM:]
    if hashlib.sha256(data).digest() != written[:CHECKSUM]:
        raise ValueError(f"a kept capture must be as it was written, got {file}")
    kept: Kept = pickle.loads(data)
    if any(digest_of(Path(path)) != known for path, known in kept.files.items()):
        return None
    read = Read(names=kept.names, keys=kept.keys, code=frozenset(map(marshal.loads, kept.code)))
    if LiveSettings(model, read).told() != kept.settings:
        return None
    captured = unpacked(kept.graph, model, read)
    if not gives_logits_of(captured, model):
        return None
    with contextlib.suppress(OSError):
        file.touch()  # it was of use
    return captured


def save(captured: Captured, model: nn.Module, folder: Path, parts: str, seen: Seen | None) -> None:
    """``seen``, if it is known, is that of the model.

    The model's Python is run last, when everything else says that the capture can be kept: not where it leaves
    something in the model, of which Dynamo's graph would have more results.

    Raises:
        ValueError: the graph is not what the model's Python asks for, in a run without data or on tokens.
    """
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
    again = unpacked(pickle.loads(data).graph, model, read)
    of_graph = operators_of_graph(again, model)
    if not gives_logits_of(again, model):
        raise ValueError("the capture must give the model's logits")
    seen = seen or operators_of(model)
    if seen.max_tokens != captured.max_tokens or seen.result != of_graph:
        raise ValueError("the capture must be what a run without data asks for")
    file = folder / f"{parts}-{seen.digest}{ENDING}"
    with tempfile.NamedTemporaryFile(dir=folder, delete=False, prefix=UNFINISHED) as written:
        try:
            written.write(hashlib.sha256(data).digest() + data)
            written.close()
            os.replace(written.name, file)
        except BaseException:
            os.unlink(written.name)
            raise
    oldest = sorted([*folder.glob(f"*{ENDING}"), *folder.glob(f"{UNFINISHED}*")], key=lambda path: path.stat().st_mtime)
    for old in oldest[:-MOST]:
        old.unlink(missing_ok=True)


def source_files(codes: Iterable[CodeType]) -> set[str]:
    """Raises ValueError for code of which there is no file, as of a notebook."""
    found = {code.co_filename for code in codes if not code.co_filename.startswith("<frozen ") and not generated(code)}
    missing = sorted(path for path in found if not Path(path).is_file())
    if missing:
        raise ValueError(f"code must come from files, got {missing[0]}")
    return found


def generated(code: CodeType) -> bool:
    """Whether it may be a method that a dataclass wrote, of which the class's own file tells all."""
    return code.co_filename == "<string>" and code.co_name.startswith("__")


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
