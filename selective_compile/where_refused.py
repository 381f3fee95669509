"""Which module of the model was being traced when Dynamo took a branch, or could not go on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._dynamo.comptime import ComptimeContext
from torch._dynamo.symbolic_convert import InstructionTranslator

from selective_compile.passes.refusals import shortened_path
from selective_compile.passes.strides import answer_without_guards


class GuardsByModule(list[Any]):
    """The conditions that a trace holds under; ``modules`` has the path of the module that asked each."""

    def __init__(self, guards: Iterable[Any]) -> None:
        super().__init__(guards)
        self.modules = [""] * len(self)

    def append(self, guard: Any) -> None:
        super().append(guard)
        self.modules.append(traced_module())


def watch_guards(context: ComptimeContext) -> None:
    """To be called while Dynamo traces: conditions that the model asks from now on are kept with its modules."""
    fake_mode = torch._guards.TracingContext.get().fake_mode
    assert fake_mode is not None and fake_mode.shape_env is not None
    env = fake_mode.shape_env
    if not isinstance(env.guards, GuardsByModule):
        env.guards = GuardsByModule(env.guards)
        answer_without_guards(env)


def traced_module() -> str:
    """The path of the module that Dynamo is in, "" if in none."""
    tx: Any = InstructionTranslator.current_tx()
    stack = tx.output.current_tx.nn_module_stack
    return shortened_path(next(reversed(stack.values()))[0]) if stack else ""


def module_of_frames(model: nn.Module, frames: Iterable[Any]) -> str:
    """The first module whose class has the innermost method among ``frames``; "" if it is the model or none.

    Of a trace that broke off there is only the stack: files, names and lines.
    """
    codes = {path: codes_of(type(module)) for path, module in model.named_modules() if path}
    for frame in reversed(list(frames)):
        for path, methods in codes.items():
            if any(holds_line(code, frame) for code in methods):
                return path
    return ""


def codes_of(kind: type) -> list[CodeType]:
    """Its own methods, and those that it inherits of a model's code."""
    bases = [base for base in kind.__mro__ if base not in nn.Module.__mro__]
    found = [method for base in bases for method in vars(base).values() if inspect.isfunction(method)]
    return [inspect.unwrap(method).__code__ for method in found]


def holds_line(code: CodeType, frame: Any) -> bool:
    lines = [line for *_, line in code.co_lines() if line is not None]
    return code.co_filename == frame.filename and min(lines) <= frame.lineno <= max(lines)


def begin_of(function: Callable[..., Any]) -> str:
    """The line where a function begins that is refused as a whole."""
    code = inspect.unwrap(function).__code__
    return f"{code.co_filename}:{code.co_firstlineno}  def {code.co_name}"
