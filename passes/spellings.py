"""Part of pass 1: operators that are other spellings of those that later passes know are traced as these.

Before::  swapaxes = aten.swapaxes(x, 1, 2); einsum = aten.einsum("...i,oi->...o", [swapaxes, w])
After::   transpose = aten.transpose(x, 1, 2); einsum = aten.einsum("abi,oi->abo", [transpose, w])

So a rule, a reader of products or a proof is written once for all spellings.  What is in `COMPOSITE` is traced as
PyTorch itself puts it together; `diff` is not in it, by which transformers asks where packed sequences begin: whole, it
is found to be the same number at all positions (`positional`), and its parts are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from selective_compile.passes.memory import overlaps
from selective_compile.passes.native_layers import multi_head_attention, transformer_encoder_layer

aten = torch.ops.aten
# Triangles are written as comparisons of index ranges, which the mask proof can evaluate at any position.
INDEX_FORM: dict[Any, Any] = get_decompositions([aten.tril, aten.triu])
COMPOSITE = (
    # Views and copies.
    *("swapaxes", "swapdims", "movedim", "moveaxis", "adjoint", "mH", "matrix_H", "narrow", "ravel", "tile"),
    *("tensor_split", "hsplit", "vsplit", "dsplit", "hstack", "vstack", "dstack", "row_stack", "column_stack"),
    *("atleast_1d", "atleast_2d", "atleast_3d", "fliplr", "flipud", "unsafe_chunk", "msort", "meshgrid"),
    # Element by element.
    *("prelu", "fix", "isclose", "arcsin", "arccos", "arctan", "arctan2", "arcsinh", "arccosh", "arctanh"),
    *(
        "special_expit",
        "special_exp2",
        "special_expm1",
        "special_log1p",
        "special_erf",
        "special_sinc",
        "special_round",
    ),
    # Along a dimension.
    *("special_softmax", "special_log_softmax", "special_logsumexp", "nanmean", "cosine_similarity"),
    *("linalg_norm", "linalg_matrix_norm", "frobenius_norm", "pairwise_distance"),
    # Products.
    *("linalg_matmul", "linalg_vecdot", "tensordot", "inner", "outer", "ger", "kron"),
    # A softmax of each token and what is picked of it, of which the first needs no other token.
    *("cross_entropy_loss", "nll_loss_nd"),
)


def filled_where(chosen: Tensor, number: Any, values: Tensor) -> Any:
    if not values.is_floating_point() or isinstance(number, complex):
        return NotImplemented
    if abs(number) > torch.finfo(values.dtype).max:  # as minus infinity, then
        number = math.copysign(math.inf, number)
    return values.masked_fill(chosen, number)


def chosen_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *, in_place: bool = False
) -> Any:
    """``x[..., mask] = number``, or a row of numbers for each place, all of which are known."""
    *others, mask = indices
    behind = x.dim() - len(others) - (0 if mask is None else mask.dim())
    if mask is None or mask.dtype is not torch.bool or any(other is not None for other in others) or accumulate:
        return NotImplemented
    if values.dim() > behind or behind < 0 or (in_place and overlaps(x)):
        return NotImplemented
    places = mask.reshape(*mask.shape, *(1,) * behind) if behind else mask
    chosen = torch.where(places, values, x) if values.dim() else x.masked_fill(places, values)
    return x.copy_(chosen) if in_place else chosen


def of_type_of(x: Tensor, other: Tensor) -> Tensor:
    """Of ``other`` nothing else is read: a mask that has the type of token ids is made of none of them."""
    return x.to(other.dtype) if x.device == other.device else x.to(other.device, other.dtype)


def triangle(decomposed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *diagonal: x.copy_(decomposed(x, *diagonal))


def pointwise_conv1d(
    x: Tensor,  # [B, C, S]
    weight: Tensor,  # [O, C, 1]
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Any:
    """A convolution that reads one token for each is a product with a matrix."""
    if weight.shape[-1] != 1 or groups != 1 or list(stride) != [1] or list(padding) != [0] or x.dim() != 3:
        return NotImplemented
    product = weight.squeeze(-1) @ x
    return product if bias is None else product + bias[:, None]


def unpadded_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: str = "valid",
    *rest: Any,
) -> Any:
    # Of one token for each, "same" adds nothing either.
    return pointwise_conv1d(x, weight, bias, stride, (0,), *rest)


def group_norm(
    x: Tensor,  # [N, C, ...]
    groups: int,
    weight: Tensor | None = None,  # [C]
    bias: Tensor | None = None,  # [C]
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """A norm over the elements of each group."""
    if any(given is not None and given.dtype != x.dtype for given in (weight, bias)):
        return NotImplemented
    grouped = x.reshape(x.shape[0], groups, -1)
    normed = torch.layer_norm(grouped, [grouped.shape[-1]], eps=eps).reshape(x.shape)
    each = (-1, *(1,) * (x.dim() - 2))
    normed = normed if weight is None else normed * weight.reshape(each)
    return normed if bias is None else normed + bias.reshape(each)


def norm_of_channels(
    x: Tensor,  # [N, C, ...]
    weight: Tensor | None,  # [C]
    bias: Tensor | None,  # [C]
    mean: Tensor | None,  # [C]
    variance: Tensor | None,  # [C]
    of_these: bool,
    momentum: float,
    eps: float,
    *rest: Any,
) -> Any:
    """A norm by a mean and a variance that were kept is a factor and an addend for each channel.

    ``of_these``: it is by those of the values it is given, as in training.
    """
    if of_these or mean is None or variance is None:
        return NotImplemented
    wide = torch.promote_types(x.dtype, torch.float32)
    factor = (variance.to(wide) + eps).rsqrt()
    factor = factor if weight is None else factor * weight.to(wide)
    addend = -mean.to(wide) * factor if bias is None else bias.to(wide) - mean.to(wide) * factor
    each = (-1, *(1,) * (x.dim() - 2))
    return (x.to(wide) * factor.reshape(each) + addend.reshape(each)).to(x.dtype)


def plain_einsum(equation: str, operands: Sequence[Tensor], *, path: Sequence[int] | None = None) -> Any:
    """Of two operands, with a letter for each dimension, no letter twice in one, and the result named."""
    inputs, out = named_dimensions(equation, [operand.dim() for operand in operands])
    if len(operands) == 1 or any(len(set(letters)) < len(letters) for letters in inputs):
        return aten.einsum.default.decompose(equation, operands, path=path)
    plain = f"{','.join(inputs)}->{out}"
    if len(operands) == 2 and plain == equation:
        return NotImplemented
    left, letters = operands[0], inputs[0]
    for i in range(1, len(operands)):
        needed = {*out, *"".join(inputs[i + 1 :])}
        both = "".join(dict.fromkeys(letters + inputs[i]))
        kept = out if i == len(operands) - 1 else "".join(letter for letter in both if letter in needed)
        left = aten.einsum.default(f"{letters},{inputs[i]}->{kept}", [left, operands[i]])
        letters = kept
    return left


def named_dimensions(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, with letters for ``...`` and for a result that is not named."""
    given, arrow, out = equation.replace(" ", "").partition("->")
    inputs = given.split(",")
    if not arrow:
        counted = given.replace(",", "").replace(".", "")
        out = "..." * ("..." in given) + "".join(sorted(c for c in set(counted) if counted.count(c) == 1))
    unused = [letter for letter in ascii_letters if letter not in equation]
    left = [rank - len(letters.replace(".", "")) for letters, rank in zip(inputs, ranks, strict=True)]
    most = max((n for n, letters in zip(left, inputs, strict=True) if "..." in letters), default=0)
    ellipsis = "".join(unused[:most])
    named = [letters.replace("...", ellipsis[most - n :]) for n, letters in zip(left, inputs, strict=True)]
    return named, out.replace("...", ellipsis)


def composite(names: Sequence[str]) -> dict[Any, Callable[..., Any]]:
    """What each of these operators, all its overloads, is put together from; and what changes a tensor so in place."""
    packets = [getattr(aten, name) for each in names for name in (each, f"{each}_") if hasattr(aten, name)]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    there = [overload for overload in overloads if torch._C._dispatch_has_kernel(overload.name())]
    return {overload: overload.decompose for overload in there if overload._can_decompose()}


SPELT_OUT: dict[Any, Any] = {
    **INDEX_FORM,
    aten.tril_.default: triangle(INDEX_FORM[aten.tril.default]),
    aten.triu_.default: triangle(INDEX_FORM[aten.triu.default]),
    **composite(COMPOSITE),
    aten.mT.default: lambda x: x.transpose(-2, -1),
    aten.broadcast_to.default: lambda x, sizes: x.expand(sizes),
    aten.type_as.default: of_type_of,
    aten.where.ScalarSelf: filled_where,
    aten.index_put.default: chosen_put,
    aten.index_put_.default: partial(chosen_put, in_place=True),
    aten.conv1d.default: pointwise_conv1d,
    aten.conv1d.padding: unpadded_conv1d,
    aten.group_norm.default: group_norm,
    **dict.fromkeys((aten.batch_norm.default, aten.instance_norm.default), norm_of_channels),
    aten.einsum.default: plain_einsum,
    aten._native_multi_head_attention.default: multi_head_attention,
    aten._transformer_encoder_layer_fwd.default: transformer_encoder_layer,
}
