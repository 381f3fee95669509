"""A model's tensors by name, and what one is beside its numbers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def all_tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and what modules have as plain attributes, under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}".lstrip("."), value


def kind_of(tensor: Tensor) -> str:
    shape, strides = list(tensor.shape), list(tensor.stride())
    return (
        f"{tensor.dtype} {tensor.device} {shape} {strides} {tensor.is_conj()} {tensor.is_neg()} {tensor.requires_grad}"
    )
