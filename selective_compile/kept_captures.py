"""Captures on disk, so that a second start of a model does not trace it again: Dynamo takes seconds for many layers.

It is taken only where all that Dynamo guards of the trace is as it was (`trace_conditions`), the source files of the
code that was traced are, and the attributes that it read (`live_settings`), and where it gives the live model's logits
on a few tokens.  What the model is made of, the versions and this package's own code are in the file's name.  What
cannot be told from one process to the next, as a tensor of the code's own, is not kept.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import marshal
import os
import pickle
import platform
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import get_torch_function_mode_stack
from torch.utils._device import DeviceContext
from transformers.utils import output_capturing

from selective_compile.capture import capture
from selective_compile.captured import Captured
from selective_compile.environment_read import variables_read
from selective_compile.kept_files import attempt, data_of, own_folder, was_of_use, write
from selective_compile.live_settings import LiveSettings, Read, words_of
from selective_compile.model_call import logits_call
from selective_compile.model_facts import check
from selective_compile.named_tensors import all_tensors_of, kind_of
from selective_compile.packed_graph import PackedGraph, packed, unpacked
from selective_compile.same_logits import gives_logits_of, ids_for, written_inputs
from selective_compile.settling import settled
from selective_compile.tensor_state import class_of
from selective_compile.told_objects import file_of
from selective_compile.trace_conditions import Conditions, hold, told

ENDING = ".capture"


@dataclass(frozen=True)
class Kept:
    graph: PackedGraph
    names: frozenset[str]
    keys: frozenset[str]
    code: tuple[bytes, ...]
    files: dict[str, str]  # by the module whose code it is
    settings: tuple[str, ...]
    variables: dict[str, str]
    conditions: Conditions
    written: tuple[int, ...]  # inputs, all of them buffers
    left_out: tuple[str, ...]


def capture_once(model: nn.Module) -> Captured:
    """As `capture`, which an earlier process may have done; what this one does is kept.

    Raises:
        ValueError, RefusedError: as `capture`.
    """
    check(model)
    parts = ""
    with attempt("look for a kept capture"):
        parts = parts_of(model)
        for file in sorted(own_folder().glob(f"{parts}-*{ENDING}")):
            with attempt(f"take {file}"):
                if (found := loaded(file, model)) is not None:
                    return found
    captured = settled(model, partial(capture, model))
    if parts:
        with attempt("keep a capture"):
            save(captured, model, own_folder(), parts)
    return captured


def loaded(file: Path, model: nn.Module) -> Captured | None:
    """None if the code that was traced, or what it read, is not as it was, or its logits are not the model's."""
    kept: Kept = pickle.loads(zlib.decompress(data_of(file)))
    if any(told_file(module) != known for module, known in kept.files.items()):
        return None
    read = Read(names=kept.names, keys=kept.keys, code=frozenset(map(marshal.loads, kept.code)))
    if variables_read(read.code) != kept.variables or LiveSettings(model, read).told() != kept.settings:
        return None
    if not hold(kept.conditions, *logits_call(model, ids_for(model))):
        return None
    captured = replace(unpacked(kept.graph, model, read, kept.conditions.traced), left_out=kept.left_out)
    if not gives_logits_of(captured, model, kept.written):
        return None
    was_of_use(file)
    return captured


def save(captured: Captured, model: nn.Module, folder: Path, parts: str) -> None:
    """Raises ValueError for what cannot be told, writes to weights, or gives other logits than the model."""
    if captured.answered_by:
        raise ValueError("a capture must not go by the values of buffers")
    written, buffers = written_inputs(captured, model), set(map(id, model.buffers()))
    if not all(id(captured.examples[place]) in buffers for place in written):
        raise ValueError("a capture must write to nothing of the model's but buffers")
    read = captured.read
    kept = Kept(
        graph=packed(captured, model),
        names=read.names,
        keys=read.keys,
        code=tuple(map(marshal.dumps, read.code)),
        files={module: told_file(module) for module in modules_of(read.code)},
        settings=LiveSettings(model, read).told(),
        variables=variables_read(read.code),
        conditions=told(captured.conditions, *logits_call(model, ids_for(model))),
        written=tuple(written),
        left_out=captured.left_out,
    )
    data = pickle.dumps(kept)  # layer after layer nearly the same, which packs well
    if not gives_logits_of(unpacked(pickle.loads(data).graph, model, read, captured.conditions), model, written):
        raise ValueError("the capture must give the model's logits")
    write(folder / f"{parts}-{hashlib.sha256(data).hexdigest()[:32]}{ENDING}", zlib.compress(data, 1))


def modules_of(codes: Iterable[CodeType]) -> set[str]:
    """Raises ValueError for code that is of no module with a file, as of a notebook."""
    files = {code.co_filename for code in codes if not code.co_filename.startswith("<frozen ") and not generated(code)}
    modules = {file_of(module): name for name, module in list(sys.modules.items())}
    if missing := sorted(files - modules.keys()):
        raise ValueError(f"code must come from the files of modules, got {missing[0]}")
    return {modules[file] for file in files}


def told_file(module: str) -> str:
    """And the names of built-in functions that the module has for its own, which Dynamo does not look for."""
    own = sys.modules.get(module)
    file = file_of(own)
    names = sorted(name for name in vars(own) if name in vars(builtins) and not name.startswith("__")) if own else []
    return f"{file} {digest_of(Path(file))} {names}"


def generated(code: CodeType) -> bool:
    """Whether it may be a method that a dataclass wrote, of which the class's own file tells all."""
    return code.co_filename == "<string>" and code.co_name.startswith("__")


def parts_of(model: nn.Module) -> str:
    """A digest of what a model is made of and of everything beside it that a capture could depend on.

    Raises:
        ValueError: a weight is of a class of its own, as quantised weights are.
    """
    if odd := [type(tensor).__name__ for _, tensor in all_tensors_of(model) if class_of(tensor) is not Tensor]:
        raise ValueError(f"weights must be plain tensors, got {odd[0]}")
    told = [f"{path} {kind.__module__}.{kind.__qualname__}" for path, kind in kinds_of(model)]
    first: dict[int, str] = {}  # of the names of one tensor
    for name, tensor in all_tensors_of(model):
        told.append(f"{name} {first.setdefault(id(tensor), name)} {type(tensor).__name__} {kind_of(tensor)}")
    told += [words_of(recorders) for recorders in recorders_of(model)]
    told += of_process()
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:32]


def recorders_of(model: nn.Module) -> list[Any]:
    """What transformers could record of modules of these classes, of which a model asks when it is called."""
    kinds = dict.fromkeys(str(kind) for _, kind in kinds_of(model))
    return [dict.get(output_capturing._CAN_RECORD_REGISTRY, kind) for kind in kinds]


def of_process() -> list[str]:
    """Versions, this package's own code, and what a trace may follow of a process.

    Raises:
        ValueError: as `settings_of_process`.
    """
    return [torch.__version__, sys.version, platform.machine(), own_code(), *settings_of_process()]


def settings_of_process() -> list[str]:
    """Of PyTorch, that a trace may follow.

    Raises:
        ValueError: a mode, which may change what any function of PyTorch is, is active.
    """
    if modes := [mode for mode in get_torch_function_mode_stack() if not isinstance(mode, DeviceContext)]:
        raise ValueError(f"no mode must be active, got {type(modes[0]).__name__}")
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    return [
        str(torch.get_default_dtype()),
        str(torch.get_default_device()),
        str(torch.are_deterministic_algorithms_enabled()),
        *(f"{torch.is_autocast_enabled(kind)} {torch.get_autocast_dtype(kind)}" for kind in ("cpu", "cuda")),
        torch.backends.cuda.matmul.fp32_precision,
        str(torch.cuda.is_available()),
        *(str(torch.cuda.get_device_capability(device)) for device in devices),
    ]


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
