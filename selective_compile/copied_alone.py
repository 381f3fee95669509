"""What a deep copy of a model would share with it, or lose: then the model is not copied.

`copy.deepcopy` shares functions, and with them what they hold, weak references, and whatever is behind a number, as a
file; and a class may say itself what a copy of it is.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from selective_compile.module_state import MACHINERY
from selective_compile.operators_seen import PLAIN, all_tensors_of

OWN_COPIES: Final = ("__deepcopy__", "__copy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__")
# Whose classes copy as they should.
KNOWN: Final = frozenset({"torch", "transformers", "numpy"}) | sys.stdlib_module_names
SHARED: Final = (*PLAIN, type, ModuleType, torch.Size)  # and nothing can be left in it


def unregistered_tensors(model: nn.Module) -> list[Tensor]:
    """Tensors that modules hold beside the model's parameters and buffers, also in containers and objects.

    Raises:
        ValueError: something would not be a copy's own: see the module.
    """
    found: list[Tensor] = []
    registered = {id(module) for module in model.modules()}
    seen = {id(tensor) for _, tensor in all_tensors_of(model)}
    left: list[tuple[str, Any]] = list(model.named_modules())
    while left:
        path, value = left.pop()
        if id(value) in seen or isinstance(value, SHARED):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found.append(value)
            continue
        check(path, value)
        machinery = MACHINERY if id(value) in registered else frozenset()
        left += ((f"{path}.{name}", part) for name, part in parts_of(value) if name not in machinery)
    return found


def check(path: str, value: Any) -> None:
    if isinstance(value, weakref.ref) or (isinstance(value, FunctionType) and value.__closure__):
        raise ValueError(f"a copy of the model must share nothing with it, got a {type(value).__name__} as {path}")
    kind = type(value)
    if kind.__module__.partition(".")[0] in KNOWN:
        return
    own = [name for base in kind.__mro__ if base.__module__.partition(".")[0] not in KNOWN for name in vars(base)]
    special = [name for name in ("__del__", *OWN_COPIES) if name in own]
    if special:
        raise ValueError(f"a copy of the model must be as it is, got {kind.__name__}.{special[0]} of {path}")


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((str(number), part) for number, part in enumerate(value))
    yield from getattr(value, "__dict__", {}).items()
