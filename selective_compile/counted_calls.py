"""Whether a model goes by how many calls there were, as in ``self.calls += 1``, then ``if self.calls > 40``.

A trial of a few calls does not see what comes after dozens.  But all that a trace has read is among what Dynamo guards,
so that no later call is another one where a call leaves that as it was.  Where it does not, a trace in which the
numbers that it changes are unknown tells whether they are only counted.  Of modules that were left whole nothing tells
what they read: they are to leave in themselves what the call before has left.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, fx, nn

from selective_compile.captured import Captured
from selective_compile.joined_graphs import inputs_of
from selective_compile.live_conditions import asked_of, spelled
from selective_compile.model_call import CANNOT, logits_call
from selective_compile.model_facts import device_of
from selective_compile.module_state import FLAGS, NO_STATE, Unlike, attributes, is_iterator, place_of, unchanged
from selective_compile.passes.normalise import source_name
from selective_compile.passes.refusals import Refusal, RefusedError
from selective_compile.sequential_program import OUTSIDE, why_not_run
from selective_compile.tensor_memory import is_plain

TOKENS: Final = 5
# In Dynamo's way to what is no attribute of a module or an item of one.
NOT_OF_MODULES: Final = re.compile(r"G\[|__closure__|__defaults__|__class__|type\(")


@torch.no_grad()
def counting_refusal(
    model: nn.Module, captured: Captured, capture: Callable[[], Captured] | None, whole: Collection[str] = ()
) -> Refusal | None:
    """What to say of ``model`` if a call may be another one than the call before, by what that has left.

    Args:
        capture: traces it once more; None: there are modules in it that no trace has.
        whole: paths of modules that are run as they are.
    """
    try:
        if (found := read_and_changed(model, captured, capture) or iterator_moved(model)) is not None:
            return refusal_of(found)
        for path in () if why_not_run(model) else whole:  # what has no `generate` is as it was loaded
            if (name := name_of_counter(model, path)) is not None:
                return refusal_of(f"model.{path}.{name}")
    except CANNOT:  # it cannot be called so
        return None
    return None


def read_and_changed(model: nn.Module, captured: Captured, capture: Callable[[], Captured] | None) -> str | None:
    """What a trace of ``model`` has read, more than to count, and each call leaves otherwise, as `LiveConditions` asks.

    What only a first call sets, as a flag, a trace behind it has as it stays.
    """
    found: list[str] = []
    with unchanged(model):
        for again in (False, True):
            if again and capture is not None:
                try:
                    captured = capture()
                except RefusedError:  # what a call leaves is no model that was traced
                    break
            call, arguments = tokens_for(model)
            known = captured.holds_for(model)
            call(*arguments)
            found = known.others()
            if not found or (capture is not None and only_counted(capture, found)):
                return None
    return found[0]


def iterator_moved(model: nn.Module) -> str | None:
    """An attribute that a call takes the next thing of, which Dynamo guards not."""

    def iterators() -> dict[Any, Any]:
        every = {(path, name): value for path, part in model.named_modules() for name, value in vars(part).items()}
        return {place: told(value, ()) for place, value in every.items() if is_iterator(value)}

    before = iterators()
    if before:
        with unchanged(model):
            call, arguments = tokens_for(model)
            call(*arguments)
        after = iterators()
        for (path, name), place in before.items():
            if after.get((path, name)) != place:
                return ".".join(part for part in ("model", path, name) if part)
    return None


def only_counted(capture: Callable[[], Captured], asked: Sequence[str]) -> bool:
    """Whether a trace that knows nothing of these numbers is made, and no logits are made of them."""
    sources = [question.removeprefix("(").removesuffix(")") for question in asked]
    if any("," in source for source in sources):  # which is between those that Dynamo is told
        return False
    settings: Any = torch.compiler.config
    try:
        with settings.patch(unbacked_sources=",".join(f"^{re.escape(source)}$" for source in sources)):
            captured = capture()
    except RefusedError:
        return False
    if not {asked_of(one) for one in captured.conditions}.isdisjoint(asked):  # it is no number
        return False
    (output,) = captured.module.graph.find_nodes(op="output")
    inputs = inputs_of(captured.module)
    return not any(node in inputs and source_name(node) in sources for node in behind(output.args[0][0]))


def behind(result: fx.Node) -> Iterator[fx.Node]:
    left, seen = [result], set[fx.Node]()
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += node.all_input_nodes
            yield node


def name_of_counter(model: nn.Module, path: str) -> str | None:
    """The attribute or buffer of a module that calls with the same tokens leave otherwise each time."""
    module = model.get_submodule(path)
    parts = {part: name for name, part in module.named_modules()}
    with unchanged(model):
        left: list[dict[Any, Any]] = []
        for _ in range(3):
            call, arguments = tokens_for(model)
            call(*arguments)
            left.append({place: told(value, ()) for place, value in attributes(parts).items() if place[1] != "part"})
    _, before, after = left
    for place, value in after.items():
        if place not in before or before[place] != value:
            return f"{parts[place[0]]}.{place[2]}".lstrip(".")
    return None


def told(value: Any, within: tuple[int, ...]) -> Any:
    """Something that is equal where the value is the same."""
    if isinstance(value, (*FLAGS, type(None), complex, bytes, Unlike)):
        return value
    if id(value) in within or isinstance(value, NO_STATE):
        return id(value)
    within = (*within, id(value))
    if isinstance(value, Tensor):
        return value.dtype, value.shape, digest_of(value) if is_plain(value) else id(value)
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, dict):
        return [(told(key, within), told(item, within)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [told(item, within) for item in value]
    if is_iterator(value):
        return told(place_of(value), within)
    return type(value), told(getattr(value, "__dict__", None), within)


def digest_of(tensor: Tensor) -> bytes:
    # Of a copy: a tensor that was given to numpy may not be resized any more.
    numbers = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    return hashlib.sha256(numbers.numpy().tobytes()).digest()


def tokens_for(model: nn.Module) -> tuple[Callable[..., Any], list[Tensor]]:
    return logits_call(model, torch.ones(1, TOKENS, dtype=torch.int64, device=device_of(model)))


def refusal_of(question: str) -> Refusal:
    kept = NOT_OF_MODULES.search(question) is None
    return Refusal(
        node="output",
        operator="calls" if kept else OUTSIDE,
        reason=f"each call changes {spelled(question)}, by which a later one may go",
        source_line="source line unknown",
        module="",
    )
