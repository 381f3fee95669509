"""Prompts of embeddings: a copy of a model that shares its weights, and knows rows of a table by ids of their own.

Ids from `FIRST` on, which no vocabulary has, stand for the rows of the table; to all behind the input embedding they
are tokens like others, so that they are proved, batched and cached like others.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from selective_compile.capture import CANNOT, device_of, logits_call, logits_of, takes
from selective_compile.isolation_trial import alike
from selective_compile.live_settings import LiveSettings
from selective_compile.passes.flatten import FlatGraph
from selective_compile.passes.traced_graph import source_line
from selective_compile.skeleton import LENGTHS, Forward, skeleton

aten = torch.ops.aten
OTHER_SHAPES = (aten.reshape.default, aten.view.default)
FIRST = 2**24
BUFFER = "given_rows"


class GivenRows:
    """A copy of a model with a table of `capacity` rows, each as wide as what its input embedding gives.

    Attributes:
        model: the copy. Parameters that the model gets anew are the copy's too; for buffers see `is_of`.
    """

    def __init__(self, model: nn.Module, capacity: int) -> None:
        """
        Raises:
            ValueError: the model takes no embeddings, or makes more of token ids than to look up rows.
        """
        assert capacity >= max(LENGTHS), capacity  # for the trial
        path = _path_of_embedding(model)
        with torch.no_grad():
            example = model.get_submodule(path)(torch.zeros(1, 1, dtype=torch.int64, device=device_of(model)))
        self._table = torch.zeros(capacity, example.shape[-1], dtype=example.dtype, device=example.device)
        self._buffers = _buffers_of(model)
        # The copy has attributes of its own: whichever of them its graph has read, the model's must stay as they were.
        self._settings = LiveSettings(model, {name for module in model.modules() for name in vars(module)})
        self.model = skeleton(model, {path: self._reading})
        _check_by_trial(model, self)

    @property
    def capacity(self) -> int:
        return len(self._table)

    def is_of(self, model: nn.Module) -> bool:
        """Whether the model has still the buffers, attributes and hooks that the copy was made with."""
        found = _buffers_of(model)
        same = len(found) == len(self._buffers) and all(map(lambda a, b: a is b, found, self._buffers))
        return same and not self._settings.change()

    def check(self, rows: Tensor) -> None:
        """Raises `ValueError`: rows [..., hidden] of another width or dtype than the model's own."""
        width, dtype = self._table.shape[1], self._table.dtype
        if rows.shape[-1] != width or rows.dtype != dtype:
            raise ValueError(
                f"inputs_embeds must be {dtype} of {width} numbers for each token, got {rows.dtype} of {rows.shape[-1]}"
            )

    def put(self, places: Sequence[int], rows: Tensor) -> list[int]:
        """Write rows [n, hidden] to the table, at so many places; the ids that they have now."""
        # Not counted as a change of the weights: what was computed of other rows holds on.
        self._table.data[list(places)] = rows.to(self._table.device)
        return [FIRST + place for place in places]

    def _reading(self, module: nn.Module) -> Forward:
        own = module.forward
        module._buffers[BUFFER] = self._table  # of the copy alone

        def forward(ids: Tensor) -> Tensor:
            given = ids >= FIRST
            rows = nn.functional.embedding((ids - FIRST).clamp(min=0), cast(Tensor, module.given_rows))
            return torch.where(given[..., None], rows, own(ids.masked_fill(given, 0)))

        return forward


def check_ids_are_only_looked_up(flat: FlatGraph, name: str) -> None:
    """Prove of the copy's graph that no id is used but to look up its row, as in `GivenRows`.

    Raises:
        ValueError: naming another node that reads ids, and where it was written.
    """
    placeholders = [node for node in flat.module.graph.nodes if node.op == "placeholder"]
    stack = placeholders[len(flat.weights) : len(flat.weights) + len(flat.tokens)]
    seen = set()
    while stack:
        ids = stack.pop()
        seen.add(ids)
        for node in ids.users:
            _check_use(node, name)
            if node.target in OTHER_SHAPES and node not in seen:
                stack.append(node)


def _check_use(node: fx.Node, name: str) -> None:
    of_table = node.target in (aten.ge.Scalar, aten.sub.Tensor) and node.args[1] == FIRST
    of_own = node.target is aten.masked_fill.Scalar and _is_given(node.args[1])
    if not (of_table or of_own or node.target in (aten.sym_size.int, *OTHER_SHAPES)):
        raise ValueError(f"{more_than_looked_up(name)}: {node.name} ({node.target}) at {source_line(node)}")


def _is_given(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.ge.Scalar and bool(node.args[1] == FIRST)


def _path_of_embedding(model: nn.Module) -> str:
    name = type(model).__name__
    for method in ("forward", "prepare_inputs_for_generation"):
        if "inputs_embeds" not in inspect.signature(getattr(model, method, lambda: None)).parameters:
            raise ValueError(f"inputs_embeds must be None for {name}, whose {method} does not take it")
    try:
        found: Any = model.get_input_embeddings()  # type: ignore[operator]
    except CANNOT:
        found = None
    paths = [path for path, module in model.named_modules() if module is found and path]
    if not paths:
        raise ValueError(f"inputs_embeds must be None for {name}, which does not say which its input embedding is")
    return paths[0]


def _buffers_of(model: nn.Module) -> list[Tensor]:
    return [each for module in model.modules() for each in module._buffers.values() if each is not None]


@torch.no_grad()
def _check_by_trial(model: nn.Module, given: GivenRows) -> None:
    """That embeddings given to the model go where those of its own go is not proved from a graph, which has ids."""
    rows = torch.randn(max(LENGTHS), given._table.shape[1], generator=torch.Generator().manual_seed(0))
    rows = rows.to(given._table)
    for length in LENGTHS:
        ids = torch.tensor([given.put(range(length), rows[:length])], device=given._table.device)
        try:
            call, arguments = logits_call(given.model, ids)
            same = alike(call(*arguments)[0], _logits_of_rows(skeleton(model, {}), rows[:length])[0])
        except CANNOT as error:
            raise ValueError(more_than_looked_up(type(model).__name__)) from error
        if not same:
            raise ValueError(more_than_looked_up(type(model).__name__))


def more_than_looked_up(name: str) -> str:
    return f"inputs_embeds must be None for {name}, which makes more of token ids than to look up rows of its embedding"


def _logits_of_rows(model: nn.Module, rows: Tensor) -> Tensor:
    """As `logits_call`, from embeddings [S, hidden]."""
    names = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False} if takes(model, names, "use_cache") else {}
    if "attention_mask" in names:
        options["attention_mask"] = torch.ones(1, len(rows), dtype=torch.int64, device=rows.device)
    if "position_ids" in names:
        options["position_ids"] = torch.arange(len(rows), device=rows.device)[None]
    return logits_of(model(inputs_embeds=rows[None], **options))
