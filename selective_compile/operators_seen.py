"""What a model's own Python asks of its tensors: every ATen operator of a run without data, for any number of tokens.

The run is of a copy of the model, on fake tensors, the number of tokens a symbol.  Two models of the same parameters
and buffers whose runs have equal digests compute the same function of them and of the tokens.  The result is told by
the operator that gave it and what that was given: by name, in full, or as the result of another one.  After an operator
that writes in place or draws random numbers all others are told together with it.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import sympy
import torch
from torch import Tensor, nn
from torch._dynamo.convert_frame import compile_lock
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from selective_compile.capture import ATTENTION_MASK, Captured, logits_call
from selective_compile.passes.lengths import CAPTURE_TOKENS, bounds_requests, longest_request
from selective_compile.passes.normalise import Symbols, source_name
from selective_compile.passes.vmapped import interpreter_of

PLAIN: Final = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)
SYMBOLIC: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
TOKENS: Final = ("L['input_ids']", ATTENTION_MASK)  # Dynamo's names for the arguments of the captured call
TOKEN: Final = sympy.Symbol("tokens", integer=True, positive=True)
OF_NO_CONCERN: Final = frozenset({"_is_buffer", "persistent", "_is_hf_initialized"})  # attributes of tensors


@dataclass(frozen=True)
class Seen:
    """A run's digest, of its result alone in ``result``; ``max_tokens`` as in `Captured`."""

    digest: str
    result: str
    max_tokens: int | None


def operators_of(model: nn.Module) -> Seen:
    """Of a run of a copy of ``model`` in evaluation mode: what that writes into modules is the copy's own.

    What it writes elsewhere, into a global or a cache of a function, stays there.

    Raises:
        ValueError: an operator is given what cannot be told from one process to the next; or the run is not for every
            number of tokens up to some.
        Exception: whatever the model, or PyTorch's fake tensors, raise where there is no data to look at.
    """
    run = FakeRun(model)
    copied = copy.deepcopy(model, run.by_id())
    with run.fakes_alone():
        call, arguments = logits_call(copied, run.ids)
        run.seen.name_tokens(arguments)
        with run.seen:
            result = call(*arguments)
    told = run.seen.told(result)
    guards = [guard.expr for guard in run.environment.guards]
    if run.environment.replacements or not all(map(bounds_requests, guards)):
        raise ValueError("a run must be for every number of tokens, got conditions on it that are not")
    own = sorted(f"{name} {run.seen.told(attributes)}" for name, attributes in attributes_of(model))
    return Seen(digest_of(told, own, [run.seen.told(guard) for guard in guards]), told, longest_request(guards))


def operators_of_graph(captured: Captured, model: nn.Module) -> str:
    """`Seen.result` of a run of the captured graph.

    Raises:
        ValueError: as `operators_of`, or its inputs and outputs are not those of a decoder.
    """
    run = FakeRun(model)
    known = run.by_id()
    with run.fakes_alone():
        call, arguments = logits_call(model, run.ids)
        run.seen.name_tokens(arguments)
        tokens = dict(zip(TOKENS, arguments, strict=False))
        placeholders = [node for node in captured.module.graph.nodes if node.op == "placeholder"]
        inputs = [
            run.ids.shape[1]
            if isinstance(example, torch.SymInt)
            else known.get(id(example), tokens.get(source_name(node)))
            for node, example in zip(placeholders, captured.examples, strict=True)
        ]
        if any(given is None for given in inputs):
            raise ValueError("a graph's inputs must be weights and tokens")
        with run.seen:
            results = interpreter_of(captured.module).run(*inputs)
    computed = [result for result in results if id(result) not in {id(fake) for fake in known.values()}]
    if len(computed) != 1:
        raise ValueError(f"a graph must give logits alone, got {len(computed)} results")
    return run.seen.told(computed[0])


class FakeRun:
    """What a run without data is made with: a fake for each of the model's tensors, and ids ``[1, S]``."""

    def __init__(self, model: nn.Module) -> None:
        self.environment = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self.environment)
        self._tensors = tensors_of(model)
        self._fakes = {name: self._mode.from_tensor(t, static_shapes=True) for name, t in self._tensors.items()}
        for name, attributes in attributes_of(model):
            vars(self._fakes[name]).update(attributes)
        device = next((fake.device for fake in self._fakes.values()), torch.device("cpu"))
        tokens = Symbols(self.environment).size("token", CAPTURE_TOKENS)
        with self._mode:
            self.ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        self.seen = OperatorsSeen(self._fakes, tokens.node.expr)

    def by_id(self) -> dict[int, Any]:
        return {id(tensor): self._fakes[name] for name, tensor in self._tensors.items()}

    @contextmanager
    def fakes_alone(self) -> Iterator[None]:
        with torch.no_grad(), self._mode, as_if_compiled():
            yield


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
                self._expressions[value] = f"symbolic {value.subs(self._tokens, TOKEN)}"
            return self._expressions[value]
        if isinstance(value, (list, tuple)):
            return [self._told(part) for part in value]
        if isinstance(value, dict):
            return [(str(name), self._told(part)) for name, part in value.items()]
        if isinstance(value, (*PLAIN, torch.memory_format)):
            return f"{type(value).__name__} {value!r}"
        raise ValueError(f"an operator must be given tensors and plain values, got {type(value).__name__}")


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


@contextmanager
def as_if_compiled() -> Iterator[None]:
    """Within, models that ask whether they are being compiled are told so, as Dynamo would.

    It tells so by one flag for all threads, which it sets back under its lock.
    """
    with compile_lock:
        before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before
