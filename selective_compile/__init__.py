"""Selective batching for Hugging Face decoders: a `torch.compile` backend and a runtime around it.

fast = torch.compile(model, backend="selective")     # padded calls whose padding costs nothing
out = sc.generate(model, input_ids, max_new_tokens=64)
engine = sc.Engine(model, sc.EngineConfig(token_budget=256))
print(sc.explain(model))
"""

from __future__ import annotations

import importlib
import sys
import threading
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from selective_compile.garbage import only_new_garbage
from selective_compile.version import __version__ as __version__

if TYPE_CHECKING:
    from selective_compile.backend import explain, selective
    from selective_compile.huggingface import generate, unwrap, wrap, wrapped
    from selective_compile.options import BackendOptions, EngineConfig
    from selective_compile.passes import RefusedError
    from selective_compile.report import Report
    from selective_compile.runtime.engine import Engine
    from selective_compile.runtime.request import Request


# Loaded on first use: `torch.compile(model, backend="selective")` needs neither the engine nor transformers.
HOMES = {
    "BackendOptions": "options",
    "Engine": "runtime.engine",
    "EngineConfig": "options",
    "RefusedError": "passes",
    "Report": "report",
    "Request": "runtime.request",
    "explain": "backend",
    "generate": "huggingface",
    "selective": "backend",
    "unwrap": "huggingface",
    "wrap": "huggingface",
    "wrapped": "huggingface",
}

__all__ = [
    "BackendOptions",
    "Engine",
    "EngineConfig",
    "RefusedError",
    "Report",
    "Request",
    "explain",
    "generate",
    "selective",
    "unwrap",
    "wrap",
    "wrapped",
]


# Two threads that import at once what imports the other's see modules half made.
_LOADING = threading.RLock()


def __getattr__(name: str) -> Any:
    if name == "runtime":
        return importlib.import_module("selective_compile.runtime")
    if name not in HOMES:
        raise AttributeError(f"module 'selective_compile' has no attribute {name!r}")
    with _LOADING, only_new_garbage():
        return getattr(importlib.import_module(f"selective_compile.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "runtime"])


def _register() -> None:
    """Make the backend known by name also where the package is not installed, as in a checkout: otherwise torch finds
    it by itself, and whoever imports this package alone need not wait for it."""
    if "torch._dynamo" not in sys.modules and entry_points(group="torch_dynamo_backends", name="selective"):
        return
    import torch

    if "selective" not in torch.compiler.list_backends(exclude_tags=()):
        from selective_compile.backend import selective as backend

        torch._dynamo.register_backend(backend, name="selective")


_register()
