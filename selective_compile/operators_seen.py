"""What a model's own Python asks of its tensors: every ATen operator of a run without data, for any number of tokens.

The run is on fake tensors, the number of tokens a symbol.  Two models of the same parameters and buffers whose runs
have equal digests compute the same function of them and of the tokens: each operator, what it is given, by name or in
full, what shapes, strides and dtypes come of it, and the conditions on the number of tokens are all in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from selective_compile.capture import logits_call
from selective_compile.module_state import unchanged
from selective_compile.passes.lengths import CAPTURE_TOKENS
from selective_compile.passes.normalise import Symbols

PLAIN: Final = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)
SYMBOLIC: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)


def operators_of(model: nn.Module) -> str:
    """The digest of a run of ``model`` in evaluation mode; nothing of it is left in the model.

    Raises:
        ValueError: an operator is given what cannot be told from one process to the next.
        Exception: whatever the model, or PyTorch's fake tensors, raise where there is no data to look at.
    """
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    tensors = tensors_of(model)
    fakes = {id(tensor): mode.from_tensor(tensor, static_shapes=True) for tensor in tensors.values()}
    seen = OperatorsSeen({name: fakes[id(tensor)] for name, tensor in tensors.items()})
    given = {name: fakes[id(tensor)] for name, tensor in all_tensors_of(model)}
    with unchanged(model), torch.no_grad(), mode, as_if_compiled():
        ids = torch.zeros(
            1, Symbols(environment).size("token", CAPTURE_TOKENS), dtype=torch.int64, device=device_of(fakes)
        )
        called: Any = Called(model, given)
        call, arguments = logits_call(called, ids)
        seen.name(arguments)
        with seen:
            result = call(*arguments)
        seen.tell("result", result)
    for guard in environment.guards:
        seen.tell("guard", str(guard.expr))
    return seen.digest()


class Called:
    """A model called with other tensors than its own; everything else of it is its own."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self._model, self._tensors = model, dict(tensors)
        self.forward = model.forward  # of which the signature is looked at
        self.config = getattr(model, "config", None)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return functional_call(self._model, self._tensors, args, options, tie_weights=False, strict=True)


class OperatorsSeen(TorchDispatchMode):
    """Tells every operator within; tensors by the name that they were given, or as the result that they are."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._hash = hashlib.sha256()
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []  # or another tensor could get the id of one that is gone
        self._count = 0
        for name, tensor in named.items():
            self._name(tensor, name)

    def name(self, arguments: list[Tensor]) -> None:
        for number, argument in enumerate(arguments):
            self._name(argument, f"argument {number}")

    def _name(self, tensor: Tensor, name: str) -> None:
        self._names[id(tensor)] = name
        self._kept.append(tensor)
        self.tell(name, kind_of(tensor))

    def tell(self, *values: Any) -> None:
        self._hash.update(f"{[self._told(value) for value in values]}\n".encode())

    def digest(self) -> str:
        return self._hash.hexdigest()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.tell(str(func), args, kwargs)
        result = func(*args, **kwargs)
        self._count += 1
        for number, part in enumerate(tree_leaves(result)):
            if isinstance(part, Tensor) and id(part) not in self._names:
                self._name(part, f"{self._count}.{number}")
            else:
                self.tell(part)
        return result

    def _told(self, value: Any) -> Any:
        """Text, or lists of text."""
        if isinstance(value, Tensor):
            return self._names.get(id(value)) or contents_of(value)
        if isinstance(value, SYMBOLIC):
            return f"symbolic {value.node.expr}"
        if isinstance(value, (list, tuple)):
            return [self._told(part) for part in value]
        if isinstance(value, dict):
            return [(str(name), self._told(part)) for name, part in value.items()]
        if isinstance(value, (*PLAIN, torch.memory_format)):
            return f"{type(value).__name__} {value!r}"
        raise ValueError(f"an operator must be given tensors and plain values, got {type(value).__name__}")


def contents_of(tensor: Tensor) -> str:
    """All of a tensor that has data: a constant of the model's code."""
    if isinstance(tensor, FakeTensor) or type(tensor) is not Tensor:
        raise ValueError(f"an operator must be given tensors of the run, got another {type(tensor).__name__}")
    with torch.utils._mode_utils.no_dispatch():
        plain = tensor.detach().cpu().contiguous()
        return f"constant {kind_of(plain)} {plain.reshape(-1).tolist()!r}"


def kind_of(tensor: Tensor) -> str:
    shape, strides = (
        [str(getattr(getattr(size, "node", None), "expr", size)) for size in sizes]
        for sizes in (tensor.shape, tensor.stride())
    )
    return f"{tensor.dtype} {tensor.device} {shape} {strides} {tensor.is_conj()} {tensor.is_neg()}"


def all_tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under the first of their names.

    Raises:
        ValueError: one is of a class of its own, as quantised weights are.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in all_tensors_of(model):
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            raise ValueError(f"weights must be plain tensors, got {type(tensor).__name__} as {name!r}")
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def device_of(fakes: Mapping[int, Tensor]) -> torch.device:
    return next((fake.device for fake in fakes.values()), torch.device("cpu"))


@contextmanager
def as_if_compiled() -> Iterator[None]:
    """Within, models that ask whether they are being compiled are told so, as Dynamo would."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
