"""Whether a trace is still one of the live model: everything that Dynamo guarded of it, looked at again.

`LiveSettings` looks before each step at what can be looked at in microseconds.  This looks at all the rest of what a
forward may have asked, as for an attribute that was not there, or of an object in a list: about a millisecond for a
model of 32 layers.
"""

from __future__ import annotations

import copy
import hashlib
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch._dynamo.guards import _get_closure_vars

from selective_compile.live_settings import is_plain
from selective_compile.passes.traced_graph import OF_NUMPY
from selective_compile.trace_conditions import Condition, Globals

MODEL: Final = "L['model']"  # beside it, arguments and what is made anew for each call
# What others look at: hooks (`LiveSettings`), and weights, which may be others (`LiveWeights`).
HOOKS: Final = "|".join(name for name in vars(nn.Module()) if "hooks" in name)
ELSEWHERE: Final = re.compile(rf"\.({HOOKS}|_global_\w*hooks\w*)\b")
WEIGHT: Final = re.compile(r"\._(parameters|buffers)\[[^\]]*\]$")
LOCAL: Final = re.compile(r"(?<![\w'\"])L\[")  # and no other name or key that ends like it
# What each kind of condition asks, as an expression of the object and of what it is asked with.
ASKS: Final = {
    "TYPE_MATCH": "type({0})",
    "CLOSURE_MATCH": "{0}.__code__",
    "DUPLICATE_INPUT": "{0} is {1}",
    "SEQUENCE_LENGTH": "len({0})",
    "DICT_KEYS_MATCH": "(*map(key_of, {0}),)",
    "MAPPING_KEYS_CHECK": "(*map(key_of, {0}),)",
    "HASATTR": "hasattr({0}, {1!r})",
    "NOT_PRESENT_IN_GENERIC_DICT": "{1!r} in vars({0})",
    "DICT_CONTAINS": "dict.__contains__({0}, {1!r})",
    "DICT_NOT_CONTAINS": "dict.__contains__({0}, {1!r})",
    "SET_CONTAINS": "set.__contains__({0}, {1!r})",
    "SET_NOT_CONTAINS": "set.__contains__({0}, {1!r})",
}
ITSELF: Final = "{0}"
STEP: Final = re.compile(r"\._modules\['([^']*)'\]")  # in Dynamo's way to a module
ARRAY: Final = OF_NUMPY  # Dynamo's way from an array to a tensor, which is another one each time
VALUES: Final = (bytes, complex, range, slice, torch.Size, torch.device)  # told by what they are, beside plain ones
GONE: Final = object()  # in place of an answer


class LiveConditions:
    """The ``conditions`` of a trace of ``model``, by what is so when this is made.

    It holds the model, and objects in it, only as long as others do.
    """

    def __init__(self, model: nn.Module, conditions: Sequence[Condition], call: Callable[..., Any]) -> None:
        """
        Args:
            call: what was traced.
        """
        self._model, self._conditions, self._call = weakref.ref(model), conditions, call
        self._namespace = {**_get_closure_vars(), "key_of": key_of, "values_of": values_of, "G": Globals(call)}
        asked = dict.fromkeys(asked_of(one) for one in conditions if is_looked_at(one))
        known = self._answers(model, asked) | self._weights_that_are_none(model)
        self._asked = [question for question, answer in known.items() if answer is not GONE]
        self._code = compile(f"[{','.join(self._asked)}]", "<conditions>", "eval")
        self._known = [Known(known[question]) for question in self._asked]

    def of(self, other: nn.Module) -> LiveConditions:
        """What is so of another model now, of all that is asked."""
        return LiveConditions(other, self._conditions, self._call)

    def change(self) -> str:
        """What is not as it was, in words; empty if all is, or the model is not there any more."""
        for question, known, now in self._others():
            got = described(now)
            got = f"another {got}" if got == str(known) else got
            return f"{spelled(question)} must stay {known}, as compiled, got {got}"
        return ""

    def others(self) -> list[str]:
        """What is not as it was, as questions of `asked_of`."""
        return [question for question, _, _ in self._others()]

    def _others(self) -> Iterator[tuple[str, Known, Any]]:
        model = self._model()
        if model is None:
            return
        try:
            found = eval(self._code, {**self._namespace, "L": {"model": model}})
        except (AttributeError, LookupError, TypeError):  # something on the way is not there, or another
            found = list(self._answers(model, self._asked).values())
        for known, now, question in zip(self._known, found, self._asked, strict=True):
            if not known.is_still(now):
                yield question, known, now

    def _weights_that_are_none(self, model: nn.Module) -> dict[str, Any]:
        """A weight may become another one, but what was none has no place in the graph."""
        asked = dict.fromkeys(asked_of(one) for one in self._conditions if WEIGHT.search(one.source))
        found = self._answers(model, asked)
        return {question: answer for question, answer in found.items() if answer is None or answer is type(None)}

    def _answers(self, model: nn.Module, asked: Sequence[str] | dict[str, None]) -> dict[str, Any]:
        """Each by itself; `GONE` where one cannot be answered."""
        namespace = {**self._namespace, "L": {"model": model}}
        found: dict[str, Any] = {}
        for question in asked:
            try:
                found[question] = eval(question, namespace)
            except (AttributeError, LookupError, TypeError):
                found[question] = GONE
        return found


class Known:
    """An answer: a value, or which object it is."""

    def __init__(self, answer: Any) -> None:
        self._by_value = is_value(answer)
        self._kind = type(answer)
        self._text = described(answer)
        self._answer: Any = answer
        if self._by_value:
            self._answer = copy.deepcopy(answer) if isinstance(answer, (list, dict, set)) else answer
        elif type(answer).__weakrefoffset__:
            self._answer = weakref.ref(answer)

    def is_still(self, now: Any) -> bool:
        if not self._by_value:
            return now is (self._answer() if isinstance(self._answer, weakref.ref) else self._answer)
        return now is self._answer or (type(now) is self._kind and bool(now == self._answer))

    def __str__(self) -> str:
        return self._text


def is_looked_at(condition: Condition) -> bool:
    source = condition.source
    if (LOCAL.search(source) and MODEL not in source) or ELSEWHERE.search(source):
        return False
    return not WEIGHT.search(source)


def asked_of(condition: Condition) -> str:
    asked = ASKS.get(condition.kind, ITSELF).format(f"({condition.source})", *condition.given)
    return f"values_of({asked})" if ARRAY in asked else asked


def is_value(answer: Any) -> bool:
    return is_plain(answer) or isinstance(answer, VALUES)


def spelled(question: str) -> str:
    """As one would write it of the model."""
    short = STEP.sub(r".\1", question).replace(MODEL, "model")
    short = short.replace(ARRAY, "torch.from_numpy(")
    return re.sub(r"^\(([^()]*)\)$", r"\1", short)


def described(answer: Any) -> str:
    if answer is GONE:
        return "nothing"
    return repr(answer) if is_value(answer) else str(getattr(answer, "__name__", type(answer).__name__))


def key_of(key: Any) -> Any:
    """A key of a dictionary, or which object it is."""
    return key if is_plain(key) else id(key)


def values_of(answer: Any) -> Any:
    """Of a tensor that was made of an array, all that there is; anything else is its own."""
    if not isinstance(answer, torch.Tensor):
        return answer
    digest = hashlib.sha256(answer.numpy().tobytes()).hexdigest()
    return f"{answer.dtype} {list(answer.shape)} {digest[:16]}"
