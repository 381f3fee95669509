"""A device that is no CPU, for a machine that has no other: `device.cpp`, under the name of `NAME`.

It is there for all of a process: `cases.py` is one of its own.
"""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

from selective_compile import implementations, isolated_op, latent_ops, ops, rotary_ops, selection_ops, state_ops  # noqa: F401
from selective_compile.kernels import native

NAME = "other"


def flags() -> tuple[str, ...]:
    """How a library is built that uses torch's headers, of which the version is a part, and nothing of Python's."""
    folders = [f"-I{folder}" for folder in cpp_extension.include_paths()]
    folders += [part for folder in cpp_extension.library_paths() for part in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    version = (f"-DOF_TORCH={torch.__version__}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    # Named before what needs them, and needed by nothing that the linker sees.
    libraries = ("-Wl,--no-as-needed", "-ltorch_cpu", "-lc10")
    return ("-std=c++20", "-O0", "-fPIC", "-shared", "-w", *version, *folders, *libraries)


def add(folder: Path) -> torch.library.Library:
    """Make `torch.device(NAME)` one that torch knows, with all operators, the package's in their reference, as long as
    the library that is returned is kept; what is compiled is in ``folder``.

    Raises:
        NativeBuildError: there is no C++ compiler.
    """
    torch.utils.rename_privateuse1_backend(NAME)
    native.load(Path(__file__).with_name("device.cpp"), cache=folder, flags=flags()).register_hooks()
    torch._register_device_module(NAME, module())
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.accelerator.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    torch.accelerator.empty_cache = lambda *_, **__: None  # type: ignore[assignment]
    resolve = implementations.resolved_name.__wrapped__
    implementations.resolved_name = functools.cache(
        lambda name, kind: "reference" if kind == NAME else resolve(name, kind)
    )
    return operators()


def operators() -> torch.library.Library:
    """The package's, which are the same Python on every device; the CPU's would be given tensors of the CPU."""
    library = torch.library.Library("selective", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("selective::"):
            op = getattr(torch.ops.selective, name.partition("::")[2]).default
            library.impl(op, functools.partial(op.redispatch, torch._C.DispatchKeySet("CPU")), "PrivateUse1")
    return library


def module() -> types.ModuleType:
    """What is to be `torch.other`."""
    found = types.ModuleType(NAME)
    answers: dict[str, Any] = dict.fromkeys(("_lazy_init", "manual_seed_all", "set_device", "synchronize"))
    answers |= {"is_available": True, "is_initialized": True, "_is_in_bad_fork": False}
    answers |= {"current_device": 0, "device_count": 1, "get_amp_supported_dtype": [torch.bfloat16, torch.float16]}
    for name, answer in answers.items():
        setattr(found, name, lambda *_, answer=answer: answer)
    return found
