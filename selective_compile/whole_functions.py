"""Python functions of a model that are known recurrences: found by running the model once, left whole by capture.

A recurrence is written in Python as a loop over tokens or over chunks of them, which capture would unroll for one
number of tokens.  `known_recurrences` runs the model on a few prompts, sees which of its own functions take and give
values of tokens, and asks what they compute.  Within `left_whole` those that are known become one operator each.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from selective_compile import function_op
from selective_compile.autocast import Autocast, autocast_of
from selective_compile.passes.constant_arguments import as_given, is_constant, kept
from selective_compile.passes.recurrence_match import (
    Recognised,
    Signature,
    TensorArgument,
    explains,
    recognise_function,
)

LENGTHS = (37, 41, 43, 47)  # of the trial: one that is no size of the model's own
DRAWN_PROMPTS = 3  # of the trial, besides one of zeros: what a function does to rare values shows on few tokens


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a function is bound: a name in a module or a class."""

    owner: Any
    name: str

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__qualname__', self.owner.__name__)}.{self.name}"

    def bound(self) -> Callable[..., Any]:
        return vars(self.owner)[self.name]

    @property
    def is_method(self) -> bool:
        return inspect.isclass(self.owner)


@dataclass(kw_only=True)
class Calls:
    """How a model called one function in the trial; ``unclear`` if no signature says it."""

    made: list[Call] = field(default_factory=list)
    unclear: bool = False


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call in the trial: by which module, if it is a method, with what arguments, and what came back; under which
    autocast, if any."""

    signature: Signature
    owner: Any
    given: Mapping[str, Any]
    output: Tensor
    autocast: Autocast | None


def known_recurrences(model: nn.Module, call: Callable[..., Any]) -> dict[Place, Recognised]:
    """The functions of ``model`` that compute a known recurrence; ``call(ids)`` runs the model on ids ``[1, S]``."""
    sizes = {size for tensor in model.state_dict().values() for size in tensor.shape}
    length = next((length for length in LENGTHS if length not in sizes), LENGTHS[0])
    first = next(model.parameters(), None)
    device = first.device if first is not None else torch.device("cpu")
    calls: dict[Place, Calls] = {}
    generator = torch.Generator().manual_seed(0)
    rows = min((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), default=1)
    with recorded(model, calls, length), torch.no_grad():
        for ids in (1, *[rows] * DRAWN_PROMPTS):
            call(torch.randint(ids, (1, length), generator=generator, device="cpu").to(device))
    found = {}
    for place, seen in calls.items():
        known = common(place, seen)
        if known is not None:
            found[place] = known
    return found


def common(place: Place, seen: Calls) -> Recognised | None:
    """What the function computes in all its calls, which may be by several modules."""
    if seen.unclear or not seen.made:
        return None
    answers: list[Recognised | None] = []
    asked: set[tuple[Signature, int]] = set()
    for call in seen.made:
        if (call.signature, id(call.owner)) not in asked:
            asked.add((call.signature, id(call.owner)))
            function = place.bound() if call.owner is None else place.bound().__get__(call.owner)
            answers.append(recognise_function(function, call.signature))
    first = answers[0]
    if first is None or any(answer != first for answer in answers):
        return None
    return first if all(explained(first, call) for call in seen.made) else None


def explained(known: Recognised, call: Call) -> bool:
    types = () if call.autocast is None else (call.autocast[1],)
    return explains(known, call.given, call.output, *types)


def places_of(model: nn.Module) -> list[Place]:
    """Functions of the Python modules that the model's layers come from, and methods of its layers; their `forward`
    where none of a class has weights or buffers: a formula has all that it reads as arguments."""
    classes = {type(module) for module in model.modules() if not type(module).__module__.startswith("torch.")}
    weighted = {type(module) for module in model.modules() if any(True for _ in tensors_of(module))}
    modules = {sys.modules[cls.__module__] for cls in classes if cls.__module__ in sys.modules}
    owners: list[Any] = [*sorted(modules, key=lambda m: m.__name__), *sorted(classes, key=lambda c: c.__qualname__)]
    found = []
    for owner in owners:
        for name, value in vars(owner).items():
            own = isinstance(value, FunctionType) and value.__module__ == getattr(owner, "__module__", owner.__name__)
            if own and not (name == "forward" and owner in weighted) and not name.startswith("__"):
                found.append(Place(owner=owner, name=name))
    return found


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Its weights and buffers, and those of its parts."""
    yield from module.parameters()
    yield from module.buffers()


@contextlib.contextmanager
def recorded(model: nn.Module, calls: dict[Place, Calls], length: int) -> Iterator[None]:
    """Within, every call of one of the model's functions that takes values of ``length`` tokens is written down."""
    with contextlib.ExitStack() as stack:
        for place in places_of(model):
            stack.enter_context(patch.object(place.owner, place.name, recorder(place, calls, length)))
        yield


def recorder(place: Place, calls: dict[Place, Calls], length: int) -> Callable[..., Any]:
    original = place.bound()
    names = named_parameters(original)

    def record(*args: Any, **kwargs: Any) -> Any:
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        # What it takes as **kwargs is left out: the formula has to explain the call without.
        given = {name: copied(value) for name, value in named.items() if name in names}
        result = original(*args, **kwargs)
        owner = given.pop(names[0], None) if place.is_method and names else None
        if sum(isinstance(value, Tensor) and length in value.shape for value in given.values()) >= 2:
            seen = calls.setdefault(place, Calls())
            signature = signature_of(given, result, length)
            seen.unclear = seen.unclear or signature is None or writes_into(signature, named)
            if signature is not None:
                output = copied(result[0] if isinstance(result, tuple) else result)
                under = autocast_of(output.device)
                seen.made.append(Call(signature=signature, owner=owner, given=given, output=output, autocast=under))
        return result

    return record


def named_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def copied(value: Any) -> Any:
    """Tensors and lists as they are now: what a function is given it may change."""
    return value.detach().clone() if isinstance(value, Tensor) else kept(value)


def writes_into(signature: Signature, named: Mapping[str, Any]) -> bool:
    """Whether a list is not what it was before the call: left whole, the function would write nothing into it."""
    return any(kept(named[name]) != value for name, value in signature.constants)


def signature_of(given: Mapping[str, Any], result: Any, length: int) -> Signature | None:
    """None where an argument is neither a tensor nor a constant, or the first result is no tensor of the tokens.

    Other results, such as the last state, are `UNREAD` when the function is left whole: a model that computes with them
    cannot be captured.
    """
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    constants = {name: value for name, value in given.items() if name not in tensors}
    outputs = result if isinstance(result, tuple) else (result,)
    if not all(map(is_constant, constants.values())):
        return None
    described = {name: described_as(name, value, length) for name, value in tensors.items()}
    output = described_as("", outputs[0], length) if isinstance(outputs[0], Tensor) else None
    if output is None or output.token_dim is None or None in described.values():
        return None
    return Signature(
        tensors=tuple(tensor for tensor in described.values() if tensor is not None),
        constants=tuple(constants.items()),
        result=output,
        returned=len(result) if isinstance(result, tuple) else None,
        absent=tuple(place for place, each in enumerate(outputs) if each is None),
        device=outputs[0].device,
    )


def described_as(name: str, value: Tensor, length: int) -> TensorArgument | None:
    """None where several dimensions could be the tokens, or tokens are not behind a batch of one."""
    dims = [dim for dim, size in enumerate(value.shape) if size == length]
    if len(dims) > 1 or (dims and (dims[0] == 0 or value.shape[0] != 1)):
        return None
    return TensorArgument(name=name, shape=tuple(value.shape), dtype=value.dtype, token_dim=dims[0] if dims else None)


@contextlib.contextmanager
def left_whole(functions: Mapping[Place, Recognised]) -> Iterator[None]:
    """Within, Dynamo sees one operator where the model calls one of these functions; everyone else sees no change."""
    with contextlib.ExitStack() as stack:
        for place, known in functions.items():
            stack.enter_context(patch.object(place.owner, place.name, one_operator(place, known)))
        yield


class Unread:
    """In the place of a result that is none of the first: something, of which nothing can be made."""


UNREAD = Unread()


class AnotherCallError(RuntimeError):
    """A function that was recognised is called in another way while it is captured."""


def one_operator(place: Place, known: Recognised) -> Callable[..., Any]:
    original = place.bound()
    names = named_parameters(original)
    order = tuple(tensor.name for tensor in known.signature.tensors)
    expected = [(name, as_given(value)) for name, value in known.signature.constants]
    result, label = known.signature.result, str(place)
    anchor = next(tensor for tensor in known.signature.tensors if tensor.token_dim is not None)
    shape = tuple(-1 if dim == result.token_dim else size for dim, size in enumerate(result.shape))
    returned, name, dim = known.signature.returned, anchor.name, anchor.token_dim
    others = [None if place in known.signature.absent else UNREAD for place in range(1, returned or 1)]

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return original(*args, **kwargs)
        given = {**dict(zip(names, args)), **kwargs}  # noqa: B905  (Dynamo reads no strict=)
        for key, value in expected:
            if given[key] != value:
                raise AnotherCallError(key)
        total = given[name].shape[dim]
        sizes = [total if size == -1 else size for size in shape]
        output = function_op.function([given[key] for key in order], label, sizes, result.dtype)
        return output if returned is None else (output, *others)

    return call
