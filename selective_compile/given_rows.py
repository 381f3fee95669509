"""Prompts of embeddings: a copy of a model that shares its weights, and knows rows of a table by ids of their own.

Ids from `FIRST` on, which no vocabulary has, stand for the rows of the table; to all behind the input embedding they
are tokens like others, so that they are proved, batched and cached like others. Such a copy can also read off its ids
the types of tokens, see `token_types`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from selective_compile.isolation_trial import alike
from selective_compile.live_settings import LiveSettings, Read
from selective_compile.model_call import CANNOT, logits_call, logits_of, own_call, without_cache
from selective_compile.model_facts import device_of
from selective_compile.module_state import lock_of, same_buffers, unchanged
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.position_limit import id_limit
from selective_compile.passes.refusals import source_line
from selective_compile.skeleton import LENGTHS, Forward, skeleton
from selective_compile.token_types import (
    check_takes_types,
    is_split,
    is_types,
    reading_types,
    refuse_use_of_types,
    rows_of_table,
)

aten = torch.ops.aten
OTHER_SHAPES = (aten.reshape.default, aten.view.default)
FIRST = 2**24
BUFFER = "given_rows"


class GivenRows:
    """A copy of a model with a table of `capacity` rows, each as wide as what its input embedding gives.

    Attributes:
        model: the copy. Parameters that the model gets anew are the copy's too; for buffers see `is_of`.
    """

    def __init__(self, model: nn.Module, capacity: int, *, with_types: bool = False) -> None:
        """
        Args:
            with_types: the copy's ids tell the types of tokens, too.

        Raises:
            ValueError: the model takes no embeddings, or makes more of token ids than to look up rows; or no types.
        """
        assert capacity >= max(LENGTHS), capacity  # for the trial
        if with_types:
            check_takes_types(model)
        with lock_of(model), same_buffers(model):  # for trials
            self._copy(model, capacity)
        if with_types:
            self.model.__class__ = reading_types(type(model))

    def _copy(self, model: nn.Module, capacity: int) -> None:
        path = _path_of_embedding(model)
        embedding, ids = model.get_submodule(path), torch.zeros(1, 1, dtype=torch.int64, device=device_of(model))
        with torch.no_grad(), unchanged(embedding):
            example = embedding(ids)
        self._table = torch.zeros(capacity, example.shape[-1], dtype=example.dtype, device=example.device)
        self._modules, self._buffers = _modules_of(model), _buffers_of(model)
        # The copy has attributes of its own: whichever of them its graph has read, the model's must stay as they were.
        names = frozenset(name for module in model.modules() for name in vars(module))
        self._settings = LiveSettings(model, Read(names=names))
        self.model = skeleton(model, {path: self._reading})
        _check_by_trial(model, self)

    @property
    def capacity(self) -> int:
        return len(self._table)

    def is_of(self, model: nn.Module) -> bool:
        """Whether the model has still the modules, buffers, attributes and hooks that the copy was made with."""
        if _modules_of(model) != self._modules:
            return False
        found = _buffers_of(model)
        same = len(found) == len(self._buffers) and all(map(lambda a, b: a is b, found, self._buffers))
        return same and not self._settings.change()

    def follow(self, model: nn.Module) -> None:
        """Give the copy the model's generation_config, which a model may get anew, and which no graph depends on."""
        self.model.__dict__["generation_config"] = getattr(model, "generation_config", None)

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


def check_ids_are_only_looked_up(flat: FlatGraph, name: str) -> int:
    """Prove of the copy's graph that no id is used but to look up its row, as in `GivenRows`.

    Returns:
        How many types of tokens there are: all that rows are looked up of have as many; 1 where it knows no types.

    Raises:
        ValueError: naming another node that reads ids, and where it was written.
    """
    placeholders = [node for node in flat.module.graph.nodes if node.op == "placeholder"]
    inputs = _followed(placeholders[len(flat.weights) : len(flat.weights) + len(flat.tokens)])
    ids = [node for read in inputs for node in read.users if is_split(node)]
    types = [node for read in inputs for node in read.users if is_types(node)]
    if ids:
        others = [node for read in inputs for node in read.users if node not in (*ids, *types)]
        _check_uses([node for node in others if not _is_of_shape(node)], name)
    _check_uses([node for read in _followed(ids or inputs) for node in read.users], name)
    return _num_types(types, name)


def _check_uses(users: Sequence[fx.Node], name: str) -> None:
    for node in users:
        if not _is_look_up(node):
            raise ValueError(f"{more_than_looked_up(name)}: {node.name} ({node.target}) at {source_line(node)}")


def _num_types(types: Sequence[fx.Node], name: str) -> int:
    """The rows of the smallest table that types are looked up in: one of their own, or that of the tokens."""
    sizes = []
    for read in _followed(types, (*OTHER_SHAPES, aten.masked_fill.Scalar)):
        for node in read.users:
            rows = rows_of_table(node, read)
            if rows is not None:
                sizes.append(rows)
            elif not _is_look_up(node):
                refuse_use_of_types(node, name)
    return min(sizes, default=1)


def _followed(nodes: Sequence[fx.Node], through: Sequence[Any] = OTHER_SHAPES) -> list[fx.Node]:
    """These, and what is made of them by such operators."""
    found = dict.fromkeys(nodes)
    stack = list(nodes)
    while stack:
        for node in stack.pop().users:
            if node.target in through and node not in found:
                found[node] = None
                stack.append(node)
    return list(found)


def _is_of_shape(node: fx.Node) -> bool:
    return node.target in (aten.sym_size.int, *OTHER_SHAPES)


def own_ids(flat: FlatGraph) -> int | None:
    """How many ids of tokens the copy's graph has rows for in the model's own table; None: its graph does not tell."""
    return id_limit(flat, through=lambda node: is_split(node) or _is_own(node))


def _is_look_up(node: fx.Node) -> bool:
    of_table = node.target in (aten.ge.Scalar, aten.sub.Tensor) and node.args[1] == FIRST
    return bool(of_table or _is_own(node) or _is_of_shape(node))


def _is_own(node: fx.Node) -> bool:
    """Whether it leaves ids of tokens as they are, for the model's own table."""
    return node.target is aten.masked_fill.Scalar and _is_given(node.args[1])


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


def _modules_of(model: nn.Module) -> list[tuple[str, type[nn.Module], weakref.ref[nn.Module]]]:
    """Which module is in which place, and of which class; one that is not there any more is like no other."""
    return [(path, type(module), weakref.ref(module)) for path, module in model.named_modules(remove_duplicate=False)]


def _buffers_of(model: nn.Module) -> list[Tensor]:
    return [each for module in model.modules() for each in module._buffers.values() if each is not None]


@torch.no_grad()
def _check_by_trial(model: nn.Module, given: GivenRows) -> None:
    """That embeddings given to the model go where those of its own go is not proved from a graph, which has ids."""
    shape, generator = (max(LENGTHS), given._table.shape[1]), torch.Generator().manual_seed(0)
    rows = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(given._table)
    with unchanged(model):
        for length in LENGTHS:
            ids = torch.tensor([given.put(range(length), rows[:length])], device=given._table.device)
            try:
                call, arguments = logits_call(given.model, ids)
                same = alike(model, call(*arguments)[0], _logits_of_rows(skeleton(model, {}), rows[:length])[0])
            except CANNOT as error:
                raise ValueError(more_than_looked_up(type(model).__name__)) from error
            if not same:
                raise ValueError(more_than_looked_up(type(model).__name__))


def more_than_looked_up(name: str) -> str:
    return f"inputs_embeds must be None for {name}, which makes more of token ids than to look up rows of its embedding"


def _logits_of_rows(model: nn.Module, rows: Tensor) -> Tensor:
    """As `logits_call`, from embeddings [S, hidden]."""
    names = inspect.signature(model.forward).parameters
    options: dict[str, Any] = without_cache(model)
    if "attention_mask" in names:
        options["attention_mask"] = torch.ones(1, len(rows), dtype=torch.int64, device=rows.device)
    if "position_ids" in names:
        options["position_ids"] = torch.arange(len(rows), device=rows.device)[None]
    return logits_of(own_call(model)(inputs_embeds=rows[None], **options))
