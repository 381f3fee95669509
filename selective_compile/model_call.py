"""How a model is called for its logits alone, where it is traced and where it is tried."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.comptime import comptime

from selective_compile.where_refused import watch_guards

# What models and modules raise when they are called in a way that they do not support.
CANNOT = (
    *(RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError),
    *(AssertionError, ImportError),
)

# What Dynamo calls the tokens that `logits_call` has a model called with.
ATTENTION_MASK = "L['attention_mask']"
TOKEN_INPUTS = ("L['input_ids']", ATTENTION_MASK)


def logits_call(model: nn.Module, ids: torch.Tensor) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """A function from token inputs to logits, and example inputs.

    An all-ones attention mask is passed where the model takes one: without it some models test whether positions are
    packed, which would put a running sum into the mask.  Positions from 0 on are passed where it takes them, as
    `generate` does: some models number tokens in another way by themselves.
    """
    names = inspect.signature(model.forward).parameters
    options = without_cache(model)

    def numbered(input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"position_ids": positions_of_tokens(input_ids)} if "position_ids" in names else {}

    def masked(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        comptime(watch_guards)
        return logits_of(own_call(model)(input_ids, attention_mask=attention_mask, **numbered(input_ids), **options))

    def plain(input_ids: torch.Tensor) -> Any:
        comptime(watch_guards)
        return logits_of(own_call(model)(input_ids, **numbered(input_ids), **options))

    if "attention_mask" in names:
        return own_code(masked), [ids, torch.ones_like(ids)]
    return own_code(plain), [ids]


def own_call(model: nn.Module) -> Callable[..., Any]:
    """What runs the model: where `model.compile` has put something compiled in front of its code, that code."""
    return model if model._compiled_call_impl is None else model._call_impl


def positions_of_tokens(input_ids: torch.Tensor) -> torch.Tensor:
    """[1, S], by which `tensor_branches` tells what is made of them."""
    return torch.arange(input_ids.shape[1], device=input_ids.device)[None]


def without_cache(model: nn.Module) -> dict[str, bool]:
    """The argument by which ``model`` makes no cache, if it has one: by its signature, or in the **kwargs of a Hugging
    Face model, of which the part that makes a cache may be the language model among several."""
    parameters = inspect.signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    passed_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    known = any(hasattr(each, "use_cache") for each in (config, text))
    return {"use_cache": False} if "use_cache" in parameters or (passed_on and known) else {}


def logits_of(result: Any) -> torch.Tensor:
    """By their name, or the first that there is of several results: a loss is None without labels.

    Where they have no dimension of requests, [S, V], or none of tokens, [1, V], as of the last one, it is put there.

    Raises:
        TypeError: none of these is a tensor.
    """
    found = result
    if hasattr(result, "logits"):
        found = result.logits
    elif isinstance(result, dict):
        found = result.get("logits")
    elif isinstance(result, (tuple, list)):
        found = next((each for each in result if each is not None), None)
    if not isinstance(found, torch.Tensor):
        raise TypeError(
            f"a forward must give logits: a tensor, the first of several, or by that name, got {type(found).__name__}"
        )
    if found.dim() != 2:
        return found
    return found[:, None] if found.shape[0] == 1 else found[None]


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own: Dynamo counts recompiles per code object."""
    assert isinstance(function, types.FunctionType)
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
