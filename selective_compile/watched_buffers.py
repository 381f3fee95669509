"""The buffers of a model that runs whole: those that its runs write, of which each request has its own, and others."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from selective_compile.module_state import Place
from selective_compile.tensor_state import version_of


class WatchedBuffers:
    """Told by their names in the model: a run may put other modules in the place of its own, and nothing here is to
    keep any of them alive."""

    def __init__(self, model: nn.Module, written: Collection[Place], *, hooks: bool) -> None:
        """
        Args:
            written: by the runs of a trial.
            hooks: the model has some, which were left out of the trial: what they write is theirs, as under `generate`,
                and no buffer is watched.
        """
        self._hooks = hooks
        self._written = {name for name, place, _ in buffers_of(model) if place in written}

    def written(self, model: nn.Module) -> set[Place]:
        return {place for name, place, _ in buffers_of(model) if name in self._written}

    def others(self, model: nn.Module) -> dict[str, Tensor]:
        """Those that runs only read, by their names; they are looked at before each step."""
        if self._hooks:
            return {}
        return {name: buffer for name, _, buffer in buffers_of(model) if name not in self._written}

    @contextmanager
    def no_others_written(self, model: nn.Module) -> Iterator[None]:
        """Raises `ValueError`: requests have shared what the model has begun to keep. From then on each has its own."""
        before = [(name, buffer, version_of(buffer)) for name, buffer in self.others(model).items()]
        yield
        written = [name for name, buffer, version in before if version_of(buffer) != version]
        if written:
            self._written.update(written)
            raise ValueError(
                "a run of the model must write no other buffers than when its engine was made, nor may anybody else "
                f"meanwhile, got {', '.join(written)}: the next step has one for each request"
            )


def buffers_of(model: nn.Module) -> Iterator[tuple[str, Place, Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{path}.{name}".strip("."), (module, "buffer", name), buffer
