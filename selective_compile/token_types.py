"""Token types: a copy of a model that reads the type of each token off its id, and gives it to the model's own forward.

To the engine these are token ids like others, of which there are more: what is computed of a token is found again by
its id and its type, and the types of generated tokens need nothing but a number that is added to their ids.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers import GenerationMixin

from selective_compile.passes.refusals import source_line

aten = torch.ops.aten
# An id of the copy is that of the token, which is less, and behind that, by shifting, the token's type.
SHIFT = 40
UNIT = 2**SHIFT
# What `generate` does with token types, which a model may do in its own way.
OF_GENERATE = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


def check_takes_types(model: nn.Module) -> None:
    """Refuse a model for which `generate` would not give each token its type, and a new one that of the last.

    Raises:
        ValueError: naming what it does not take, or does in its own way.
    """
    name = type(model).__name__
    if "token_type_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"token_type_ids must be None for {name}, whose forward does not take it")
    if "forward" in vars(model):
        raise ValueError(f"token_type_ids must be None for a {name} whose forward was replaced")
    for method in OF_GENERATE:
        if getattr(type(model), method, None) is not getattr(GenerationMixin, method):
            raise ValueError(f"token_type_ids must be None for {name}, which has a {method} of its own")


def reading_types(kind: type[nn.Module]) -> type[nn.Module]:
    """The class with a forward whose ids are `typed` ones, and nothing else changed.

    A class, since a copy of a copy, in which modules are replaced again, is to call its own.
    """
    own = kind.forward

    @functools.wraps(own)
    def forward(self: nn.Module, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        types = torch.bitwise_right_shift(input_ids, SHIFT)
        return own(self, torch.bitwise_and(input_ids, UNIT - 1), *args, token_type_ids=types, **kwargs)

    names = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names)


def typed(ids: Any, types: Tensor) -> list[int]:
    """The ids that tell types [n] too, of token ids in one dimension."""
    return (torch.as_tensor(ids, dtype=torch.int64, device="cpu") + types.cpu().long() * UNIT).tolist()


def is_split(node: fx.Node) -> bool:
    """Whether it takes the token's id off one that tells its type."""
    return node.target in (aten.bitwise_and.Scalar, aten.bitwise_and.Tensor) and bool(node.args[1] == UNIT - 1)


def is_types(node: fx.Node) -> bool:
    """Whether it takes the token's type off such an id."""
    shifts = (aten.bitwise_right_shift.Tensor_Scalar, aten.__rshift__.Scalar)
    return node.target in shifts and bool(node.args[1] == SHIFT)


def rows_of_table(node: fx.Node, read: fx.Node) -> int | None:
    """How many rows the table has that the node reads at these places; None: it does something else."""
    if node.target is aten.embedding.default and node.args[1] is read and isinstance(node.args[0], fx.Node):
        return int(node.args[0].meta["val"].shape[0])
    return None


def refuse_use_of_types(node: fx.Node, name: str) -> None:
    """Raises ValueError."""
    raise ValueError(
        f"token_type_ids must be None for {name}, which makes more of token types than to look up rows of a table: "
        f"{node.name} ({node.target}) at {source_line(node)}"
    )
