"""Trials on disk: what a model has passed once it passes again, with the same weights, code and settings.

A trial calls the model some twenty times, which takes the longer the larger it is; to add up its weights takes as long
as to read them once.  Only that a model has passed is kept, in the name of an empty file: of one that was refused all
is tried anew.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from selective_compile.captured import Captured
from selective_compile.kept_captures import kinds_of, modules_of, parts_of, told_file
from selective_compile.kept_files import attempt, data_of, own_folder, was_of_use, write
from selective_compile.kept_weights import sums_of
from selective_compile.live_settings import is_object, words_of
from selective_compile.named_tensors import all_tensors_of
from selective_compile.passes import Refusal

ENDING = ".passed"
OF_ANY_MODULE = frozenset(vars(nn.Module()))  # hooks, of which none may be there, and its tensors and modules
OF_THIS_PROCESS = ("_original_object_hash",)  # of a `GenerationConfig`, whose hashes each process has of its own


def passed_once(model: nn.Module, captured: Captured, trial: Callable[[], Refusal | None]) -> Refusal | None:
    """As ``trial``, which is not run where ``model`` has passed it in an earlier process or in this one."""
    file = None
    with attempt("look for a kept trial"):
        file = own_folder() / f"{digest(model, captured)}{ENDING}"
        if file.exists() and not data_of(file):
            was_of_use(file)
            return None
    found = trial()
    if file is not None and found is None:
        with attempt("keep a trial"):
            write(file, b"")
    return found


def digest(model: nn.Module, captured: Captured) -> str:
    """Of all that a call of the model, with a cache or without, may depend on.

    Raises:
        ValueError: as `parts_of`, or some code is of no module with a file; weights have no plain numbers.
    """
    found = hashlib.sha256(f"{parts_of(model)} {transformers.__version__}".encode())
    for words in (*told_of_code(model, captured), *told_of_attributes(model)):
        found.update(f"{words}\n".encode())
    for sums in sums_of_tensors(model):
        found.update(sums.numpy().tobytes())
    return found.hexdigest()[:32]


def told_of_code(model: nn.Module, captured: Captured) -> Iterator[str]:
    """The files of what was traced and of the classes of its modules, and these as they are now."""
    kinds = dict.fromkeys(base for _, kind in kinds_of(model) for base in kind.__mro__)
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", *sys.stdlib_module_names)]
    yield from map(told_file, sorted({*modules_of(captured.read.code), *(kind.__module__ for kind in own)}))
    for kind in own:
        yield f"{kind.__qualname__} {[(name, words_of(value)) for name, value in vars(kind).items()]}"


def told_of_attributes(model: nn.Module) -> Iterator[str]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in OF_ANY_MODULE}
        yield f"{path} {module.training} {told_of(own, seen)}"


def told_of(attributes: dict[str, Any], seen: set[int]) -> str:
    """What objects among them hold, too, as a configuration; of each object once."""
    told = []
    for name, value in attributes.items():
        if name in OF_THIS_PROCESS:
            continue
        told.append(f"{name} {words_of(value)}")
        if is_object(value) and not isinstance(value, nn.Module) and id(value) not in seen:
            seen.add(id(value))
            told.append(told_of(vars(value), seen))
    return f"{told}"


def sums_of_tensors(model: nn.Module) -> Iterator[Tensor]:
    """On the host."""
    tensors = {id(tensor): tensor for _, tensor in all_tensors_of(model)}
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors.values():
        sums = sums_of(tensor).sums
        if sums is None:
            raise ValueError(f"weights must have plain numbers, got {tensor.layout}")
        found.setdefault(sums.device, []).append(sums)
    for each in found.values():
        yield torch.cat(each).cpu()
