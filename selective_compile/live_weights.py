"""What a compiled graph reads of the live model: tensors, looked up before each step, and whether it is still its."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

import torch
from torch import Tensor, nn

from selective_compile.cache_reach import kept_keys
from selective_compile.captured import Captured
from selective_compile.entries import Entries
from selective_compile.forks import lock_of_any_process
from selective_compile.live_conditions import LiveConditions
from selective_compile.live_settings import NOTHING, LiveSettings
from selective_compile.module_state import lock_of
from selective_compile.optimizer_steps import count_steps_for
from selective_compile.own_generation import tried
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.proved_tensors import ProvedTensors
from selective_compile.tensor_state import States, class_of, states, strides

# The parameters or buffers of a module, the name among them, and the module's path.
Owner = tuple[dict[str, Any], str, str]
EVERY: Final = 1.0  # seconds between close looks while steps follow each other: they take a thousandth of that


class LiveWeights:
    """The model's tensors that a graph reads, looked up anew with each `version`, as before each step."""

    def __init__(self, model: nn.Module, flat: FlatGraph, captured: Captured | None = None) -> None:
        """
        Args:
            captured: what the graph was made of; None: nothing is known of what that read beside tensors.
        """
        self._kind, self._attributes = type(model), vars(model)
        self._tried = tried(self._kind, self._attributes)
        self._kept_keys = kept_keys(self._attributes.get("config"))
        self._settings = LiveSettings(model, captured.read if captured is not None else NOTHING)
        self._conditions = captured.holds_for(model) if captured is not None else None
        self._look_closely_at = 0.0
        owners: dict[int, list[Owner]] = {}
        self._modules, self._slots, self._proved = Entries(), Entries(), Entries()
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # what it has cannot be replaced
                continue
            for name, child in module._modules.items():
                self._modules.add(module._modules, name, child)
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        owners.setdefault(id(tensor), []).append((tensors, name, path))
        constants: list[Any] = [given.example for given in flat.weights]
        # To the graph, a weight that the model has in several places is one input.
        self._tied: list[tuple[Owner, Owner]] = []
        for constant in constants:
            (owner, name, path), *others = owners.get(id(constant), [({"": constant}, "", "")])
            self._slots.add(owner, name, constant, path)
            self._tied += [((owner, name, path), other) for other in others]
        proved: list[Any] = [given.example for given in flat.proved_from]
        proved += captured.answered_by if captured is not None else ()
        for tensor in proved:  # one that is no buffer stays in its place, or `change` tells
            owner, name, _ = owners.get(id(tensor), [({"": tensor}, "", "")])[0]
            self._proved.add(owner, name, tensor)
        self._values = ProvedTensors(proved)
        self._kinds = [(t.shape, t.dtype, t.device, strides(t), class_of(t)) for t in constants]
        self._run = lock_of(model)
        # Engines may share a program: what a look has found is never put in the place of later.
        self._lock = lock_of_any_process()
        # As `version` found them last: the tensors and their states, the same object until those change.
        self.seen: tuple[Sequence[Any], States] = constants, states(constants)
        count_steps_for(self)

    def tensors(self) -> list[Tensor]:
        """That are the model's now."""
        with self._lock:
            return [tensor for tensor in self._slots.found() if isinstance(tensor, Tensor)]

    def version(self) -> States:
        """Look the tensors up; see `States`.  While somebody runs the model itself, there may be others in it.

        Raises:
            ValueError: the graph is not that of the model any more: as in `change`; or a tied weight was replaced in
                one of its places only, or a weight got another class, shape, dtype, device or strides, or a tensor that
                masks were proved from got other values.
        """
        try:
            return self._version()
        except ValueError:
            with self._run:
                return self._version()

    def _version(self) -> States:
        if change := self.change():
            raise ValueError(f"the model must stay as it was compiled: {change}; set it back, or make another Engine")
        for one, other in self._tied:
            if one[0].get(one[1]) is not other[0].get(other[1]):
                names = " and ".join(repr(dotted(path, name)) for _, name, path in (one, other))
                raise ValueError(f"{names} must stay the one weight that they were when compiled, got two")
        with self._lock:
            tensors, (_, known) = self._slots.found(), self.seen
            version = states(tensors, known)
            if version is not known:
                self._check_kinds(tensors)
            self.seen = tensors, version
        if not self._values.hold(self._proved.found()):
            names = ", ".join(sorted(set(self._proved.names)))
            raise ValueError(f"tensors that a proof has read must keep their values, got others in {names}")
        return version

    def are_of(self, model: nn.Module) -> bool:
        """Whether it is the very object that they were looked up in, or a proxy of it."""
        return vars(model) is self._attributes

    def change(self, *, closely: bool = False) -> str:
        """What the graph is not of any more, beside tensors, in words; empty if it is that of the model.

        ``closely``: all of it, as is done now and then in any case.
        """
        for _, name, *_ in self._modules.others():
            return f"modules must stay those it was compiled with, got another {name!r}"
        if change := self._settings.change():
            return change
        if not (closely or monotonic() >= self._look_closely_at):
            return ""
        if kept_keys(self._attributes.get("config")) != self._kept_keys:
            return "what the configuration says of generate's cache must stay what it was when compiled, got another"
        if tried(self._kind, self._attributes) != self._tried:
            return "what generate prepares a step by must stay what it was when compiled, got another function"
        if self._conditions is not None and (change := self._conditions.change()):
            return change
        self._look_closely_at = monotonic() + EVERY  # not behind a change, which the next step must see, too
        return ""

    def conditions_of(self, other: nn.Module) -> LiveConditions:
        """What is so now of a model that the graph's own is a copy of."""
        assert self._conditions is not None
        return self._conditions.of(other)

    def look_closely(self) -> None:
        """At all of it, in the next `version`."""
        self._look_closely_at = 0.0

    def _check_kinds(self, tensors: Sequence[Any]) -> None:
        places = self._slots.known()
        for tensor, place, (shape, dtype, device, steps, own) in zip(tensors, places, self._kinds, strict=True):
            is_one = isinstance(tensor, Tensor)
            if not is_one or tensor.dtype != dtype or tensor.shape != shape or tensor.device != device:
                found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}" if is_one else None
                raise ValueError(
                    f"the model's {named_at(place) or 'tensors'!r} must stay {dtype} {list(shape)} on {device}, "
                    f"as compiled, got {found}"
                )
            if strides(tensor) != steps:  # which the graph does not look at
                raise ValueError(
                    f"strides of {named_at(place)!r} must stay {steps}, as compiled, got {strides(tensor)}"
                )
            if (kind := class_of(tensor)) != own:
                raise ValueError(
                    f"the class of {named_at(place)!r} must stay {named(own)}, as compiled, got {named(kind)}"
                )


def named_at(place: tuple[str, str, Any]) -> str:
    """The whole name of what is at a path by a name."""
    path, name, _ = place
    return dotted(path, name)


def dotted(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name)))


def named(kind: Any) -> str:
    """What `class_of` gave, without the parts of a tensor that is made of others."""
    return str((kind[0] if isinstance(kind, tuple) else kind).__name__)
