"""Run a Triton kernel on CPU tensors in Triton's interpreter, without the variable TRITON_INTERPRET.

That variable is read when Triton is imported and turns every kernel of the process, so that nothing can be
compiled beside it. Here one kernel is interpreted when it is called, and the same object still compiles.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction, interpreter_builder
from triton.runtime.jit import JITFunction


class Interpreted(InterpretedFunction):
    """A kernel, or a function that one calls."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call in a kernel, whose launch has put the interpreter in place of Triton's language for all functions
        that it calls; each call would look through the whole language for what is left to replace, which took a third
        of the time."""
        return self.rewrite()(*args, **kwargs)


@functools.cache
def interpreted(kernel: Any) -> Any:
    """The kernel as an interpreted one: same parameters, same `[grid](...)` launch, CPU tensors.

    The jitted functions it calls are interpreted too. A kernel must call `tl.reduce(x, axis, combine)` in
    place of `tl.max` and the like, which are jitted functions of Triton itself and out of reach.
    """
    if isinstance(kernel, InterpretedFunction):
        return kernel
    # Whether sums of 32 bits overflow takes a third of the interpreter's time to find out, and GPUs do not ask either.
    interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
    # Only what the kernel names: kernels of one module see each other, and need not be interpreted together. The
    # interpreter looks for Triton's language in every function, in those, too, that do nothing but call others.
    module, names = kernel.fn.__globals__, ("tl", *kernel.fn.__code__.co_names)
    scope = {name: module[name] for name in names if name in module}
    scope |= {name: interpreted(value) for name, value in scope.items() if isinstance(value, JITFunction)}
    # The interpreter adds its own names to the function's globals: this copy keeps them out of the module.
    return Interpreted(types.FunctionType(kernel.fn.__code__, scope, kernel.fn.__name__))


def on_device(kernel: Any, tensor: Tensor) -> Any:
    """The kernel for the device where the tensor is: as it is on a GPU, interpreted on a CPU."""
    return kernel if tensor.is_cuda else interpreted(kernel)
