"""Runs without data of a model, and of a graph that was captured of it: on fake tensors, for any number of tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.convert_frame import compile_lock
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from selective_compile.capture import ATTENTION_MASK, Captured, logits_call
from selective_compile.copied_alone import unregistered_tensors
from selective_compile.operators_seen import OperatorsSeen, attributes_of, digest_of, tensors_of
from selective_compile.passes.lengths import CAPTURE_TOKENS, bounds_requests, longest_request
from selective_compile.passes.normalise import Symbols, source_name
from selective_compile.passes.vmapped import interpreter_of

TOKEN_INPUTS: Final = ("L['input_ids']", ATTENTION_MASK)  # Dynamo's names for the arguments of the captured call


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
            number of tokens up to some; or a copy of the model would not be on its own (`copied_alone`).
        Exception: whatever the model, or PyTorch's fake tensors, raise where there is no data to look at.
    """
    run = FakeRun(model)
    others = {id(tensor): tensor for tensor in unregistered_tensors(model)}  # which the run must not meet
    copied = copy.deepcopy(model, others | run.by_id())
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
        tokens = dict(zip(TOKEN_INPUTS, arguments, strict=False))
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
        # Without Python's dispatcher torch 2.11 asks for numbers where the sizes of a product are symbols.
        with torch.no_grad(), self._mode, enable_python_dispatcher(), as_if_compiled():
            yield


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
