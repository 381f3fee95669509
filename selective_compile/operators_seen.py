"""What a model's own Python asks of its tensors: every ATen operator of a run without data, for any number of tokens.

The run is of a copy of the model, on fake tensors, the number of tokens a symbol.  Two models of the same parameters
and buffers whose runs have equal digests compute the same function of them and of the tokens.  The result is told by
the operator that gave it and what that was given: by name, in full, or as the result of another one.  After an operator
that writes in place or draws random numbers all others are told together with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import sympy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PLAIN: Final = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)
SYMBOLIC: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
NUMBER_OF_TOKENS: Final = sympy.Symbol("tokens", integer=True, positive=True)
OF_NO_CONCERN: Final = frozenset({"_is_buffer", "persistent", "_is_hf_initialized"})  # attributes of tensors


class OperatorsSeen(TorchDispatchMode):
    """Tells every tensor: by the name that it was given, or by the operator that it is the result of."""

    def __init__(self, named: Mapping[str, Tensor], tokens: Any) -> None:
        super().__init__()
        self._tokens = tokens
        self._expressions: dict[sympy.Basic, str] = {}
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []  # or another tensor could get the id of one that is gone
        self._before = ""  # all that wrote in place, or was random, up to now
        for name, tensor in named.items():
            self._name(tensor, f"weight {name} {kind_of(tensor)}")

    def name_tokens(self, arguments: list[Tensor]) -> None:
        for number, argument in enumerate(arguments):
            self._name(argument, f"argument {number} {argument.dtype} {argument.device}")

    def _name(self, tensor: Tensor, name: str) -> None:
        self._names[id(tensor)] = name
        self._kept.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        told = digest_of(self._before, str(func), self._told(args), self._told(kwargs))
        result = func(*args, **kwargs)
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            self._before = told
        for number, part in enumerate(tree_leaves(result)):
            if isinstance(part, Tensor) and id(part) not in self._names:
                self._name(part, f"result {number} of {told}")
        return result

    def told(self, value: Any) -> str:
        return digest_of(self._before, self._told(value))

    def _told(self, value: Any) -> Any:
        """Text, or lists of text."""
        if isinstance(value, Tensor):
            return self._names.get(id(value)) or contents_of(value)
        if isinstance(value, SYMBOLIC):
            return self._told(value.node.expr)
        if isinstance(value, sympy.Basic):
            if value not in self._expressions:
                self._expressions[value] = f"symbolic {self._of_tokens(value)}"
            return self._expressions[value]
        if isinstance(value, (list, tuple)):
            return [self._told(part) for part in value]
        if isinstance(value, dict):
            return [(str(name), self._told(part)) for name, part in value.items()]
        if isinstance(value, (*PLAIN, torch.memory_format)):
            return f"{type(value).__name__} {value!r}"
        raise ValueError(f"an operator must be given tensors and plain values, got {type(value).__name__}")

    def _of_tokens(self, value: sympy.Basic) -> sympy.Basic:
        """Any other symbol stands for what only data could tell, and its name not for what it was read from."""
        found = value.subs(self._tokens, NUMBER_OF_TOKENS)
        if not found.free_symbols <= {NUMBER_OF_TOKENS}:
            raise ValueError(f"sizes must follow from the number of tokens, got {value}")
        return found


def digest_of(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


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


def attributes_of(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """What Python has put on parameters and buffers beside their numbers, under the first of their names."""
    for name, tensor in tensors_of(model).items():
        own = {
            key: value
            for key, value in vars(tensor).items()
            if key not in OF_NO_CONCERN and not key.startswith("_dynamo_")
        }
        if own:
            yield name, own
