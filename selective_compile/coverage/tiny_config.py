"""A tiny configuration of any registered model type, made from what its class declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from selective_compile.coverage.sizes import EVEN_IF_UNSET, LAYER_FIELDS, OWN, PAIRS, SIZES, SWITCHES, VOCABULARY

LAYERS = 2  # where the layers are all of one kind
Fields = dict[str, Any]


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Every kind of layer that ``model_type`` has once, at least two layers, all sizes small.

    Raises:
        KeyError: transformers does not know the type.
    """
    return shrunk(CONFIG_MAPPING[model_type], {}, OWN.get(model_type, {}))


def shrunk(kind: type[PreTrainedConfig], given: Fields, own: Mapping[str, Any]) -> PreTrainedConfig:
    """``given`` are arguments of the default, as a composite configuration has them for its parts.

    ``own`` goes over the tiny fields.  A mapping for a part goes over the fields of the part, None leaves it out.
    """
    default = kind(**given)
    parts = [name for name in kind.sub_configs if isinstance(getattr(default, name), PreTrainedConfig)]
    fields = {**given, **tiny_fields(kind, given)}
    for name in parts:
        inner = own.get(name, {})
        part = type(getattr(default, name))
        fields[name] = None if inner is None else shrunk(part, initial(kind, name), inner)
    fields |= {name: value for name, value in own.items() if name not in parts}
    return kind(**fields | layers_of_each_kind(kind, fields, own))


def initial(kind: type[PreTrainedConfig], part: str) -> Fields:
    """Arguments of the part's own default; transformers 5.17 declares none."""
    defaults = getattr(kind, "sub_configs_defaults", {})
    return dict(getattr(defaults.get(part), "init_kwargs", {}))


def declared(kind: type[PreTrainedConfig], given: Mapping[str, Any]) -> Fields:
    """The default of every field that the class declares."""
    return {field.name: given.get(field.name, field.default) for field in dataclasses.fields(kind)}


def tiny_fields(kind: type[PreTrainedConfig], given: Mapping[str, Any]) -> Fields:
    """What is smaller, or switched on, in comparison with the default."""
    defaults = declared(kind, given)
    tiny: Fields = {}
    for name, value in defaults.items():
        if name in SWITCHES and isinstance(value, bool):
            tiny[name] = SWITCHES[name]
        elif name in SIZES and (is_number(value) and value > SIZES[name]):
            tiny[name] = SIZES[name]
        elif name in EVEN_IF_UNSET and value is None:
            tiny[name] = SIZES[name]
        elif name.endswith(("_token_id", "_token_index")):
            tiny |= token_within_vocabulary(name, value, taken=len(tiny))
    for fewer, more in PAIRS:
        if is_number(defaults.get(fewer)) and defaults[fewer] == defaults.get(more):
            tiny[fewer] = tiny.get(more, defaults[more])  # as many keys as queries may be what the class relies on
    return tiny


def is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def token_within_vocabulary(name: str, value: object, *, taken: int) -> Fields:
    """An id of its own at the end of the small vocabulary, where no prompt has it."""
    if is_number(value) and value >= VOCABULARY:  # type: ignore[operator]
        return {name: VOCABULARY - 1 - taken % 8}
    if isinstance(value, list) and any(token >= VOCABULARY for token in value):
        return {name: [VOCABULARY - 1]}
    return {}


def layers_of_each_kind(kind: type[PreTrainedConfig], fields: Fields, own: Mapping[str, Any]) -> Fields:
    """The number of layers, and the lists that say what each layer is, cut down to one layer of each kind.

    The lists are those of the default depth, so that a pattern such as five windows and then one full attention is
    there; a layer's kind is what all of them say of it together.
    """
    defaults = declared(kind, fields)
    depths = [name for name in LAYER_FIELDS if is_number(defaults.get(name))]
    tiny = {name: min(LAYERS, defaults[name]) for name in depths if name not in own}
    main = depths[0] if depths else None
    if main is None or main in own:
        return tiny
    full = vars(kind(**fields))  # its own attributes: some configurations refuse to be asked for what varies by layer
    lists = {name: list(full[name]) for name in defaults if isinstance(full.get(name), (list, tuple))}
    depth = defaults[main]
    columns = {
        name: value
        for name, value in lists.items()
        if name not in own and len(value) == depth and value != list(range(depth))
    }
    chosen = one_of_each(list(zip(*columns.values(), strict=True))) if columns else range(tiny[main])
    return tiny | {main: len(chosen)} | {name: [column[i] for i in chosen] for name, column in columns.items()}


def one_of_each(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """Indices of the first of every distinct row in their order, that of the last row last; at least `LAYERS`."""
    first: dict[str, int] = {}
    for index, row in enumerate(rows):
        first.setdefault(repr(row), index)
    first[repr(rows[-1])] = len(rows) - 1
    chosen = sorted(first.values())
    return chosen if len(chosen) >= LAYERS else [0, *chosen]
