"""Which recurrence a Python function computes, if any: found by its shapes, proved by running it.

The function's tensors are tried in every role that their shapes allow, with every way to write the formula.  For each
trial values are drawn, the function is called with them, and so is the formula (`Family.run`, by the reference).  One
that agrees on few tokens must agree on many: on one alone, and across every chunk that a function may cut tokens into.
Names of functions and arguments play no part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selective_compile.implementations import forced_implementation
from selective_compile.passes.constant_arguments import as_given, number_pair
from selective_compile.passes.recurrence_families import FAMILIES, Family, Role
from selective_compile.rounding import coarsest, rounded_as

FIRST_TRIAL = 5
# Around the chunks that scans are cut into: 64 (delta rules) to 256 (Mamba-2); odd, so that a last chunk is not full.
LENGTHS = (1, 2, 3, 63, 65, 131, 300, 521)
TOLERANCE = 1e-3  # of the largest value: sums in another order; a wrong role is off by about the value itself
FACTORS = (0.0, 1e-5, 1e-3, -1.0, 30.0, -30.0, 1e3)  # of the values of one role, the others being as usual
LARGEST = 1e18  # of what is compared: near the end of float32 a function's own factors may be beyond it
SCALED_LENGTH, SCALED_TOLERANCE = 3, 1e-4  # sums are short, and so are their roundings
WRONG_CALL = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError)


@dataclass(frozen=True, kw_only=True)
class TensorArgument:
    """A tensor that a function was called with: ``[1, ..., S, ...]`` where ``token_dim`` says which one S is."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    token_dim: int | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that are neither the batch nor the tokens."""
        return (
            self.shape
            if self.token_dim is None
            else tuple(size for dim, size in enumerate(self.shape) if dim not in (0, self.token_dim))
        )


@dataclass(frozen=True, kw_only=True)
class Signature:
    """How a model called a function: its tensors, everything else, and the one tensor with tokens that came back.

    ``constants``: everything else, by name, as `constant_arguments.kept` has it.
    ``returned``: the length of the tuple whose first member that tensor was; None if no tuple.  ``absent``: the places
    in it where there was None.
    """

    tensors: tuple[TensorArgument, ...]
    constants: tuple[tuple[str, Any], ...]
    result: TensorArgument
    returned: int | None
    device: torch.device
    absent: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """A function that computes ``family``: ``roles`` says which of its tensors (by place) is what.

    ``unlimited_steps``: the model goes on behind a prompt without the limits that the function has.
    """

    family: Family
    roles: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, Any], ...]
    signature: Signature
    letters: tuple[tuple[str, int], ...]
    unlimited_steps: bool = False

    @property
    def limits(self) -> tuple[float, float] | None:
        """Of the time step, where they can change it."""
        options = dict(self.options)
        limits = options.get("limits")
        changes = limits is not None and not (options["softplus"] and limits[0] <= 0 and limits[1] == math.inf)
        return limits if changes else None

    def state_shape(self) -> tuple[int, ...]:
        sizes = {str(number): number for number in range(10)}
        for letter, size in self.letters:
            sizes |= {letter.lower(): size + 1, letter: size}
        return tuple(sizes[letter] for letter in self.family.state)


def recognise_function(function: Callable[..., Any], signature: Signature) -> Recognised | None:
    """What ``function`` computes, called as ``signature`` says, without autocast; None if it is no known recurrence."""
    with forced_implementation("reference"), torch.autocast(signature.device.type, enabled=False):
        return next((found for found in readings(signature) if is_known(function, found)), None)


def readings(signature: Signature) -> Iterator[Recognised]:
    """All that a function which is called so could compute."""
    for family in FAMILIES:
        for roles, letters in assignments(family, signature):
            for options in ways(family, signature):
                yield Recognised(
                    family=family,
                    roles=tuple(roles.items()),
                    options=tuple(options.items()),
                    signature=signature,
                    letters=tuple(letters.items()),
                )


def is_known(function: Callable[..., Any], found: Recognised) -> bool:
    lengths = (FIRST_TRIAL, *LENGTHS)
    return all(agrees(function, found, length) for length in lengths) and agrees_scaled(function, found)


def ways(family: Family, signature: Signature) -> Iterator[dict[str, Any]]:
    """The ways to write the formula; a pair of numbers among the constants may be limits."""
    pairs = [pair for _, value in signature.constants if (pair := number_pair(value)) is not None]
    for options in family.options:
        for limits in (*pairs, None) if family.reads_limits else ():
            yield {**options, "limits": limits}
        if not family.reads_limits:
            yield options


def assignments(family: Family, signature: Signature) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """Every way to give all tensors a role of the family, by their shapes, with the sizes of its letters."""

    def fill(roles: tuple[Role, ...], taken: dict[str, int], letters: dict[str, int]) -> Iterator[Any]:
        if not roles:
            if len(taken) == len(signature.tensors) and sizes_fit(family, letters, signature.result.sizes):
                yield dict(taken), dict(letters)
            return
        role, *rest = roles
        for place, tensor in enumerate(signature.tensors):
            if place in taken.values() or role.per_token != (tensor.token_dim is not None):
                continue
            unified = unify(role.dims, tensor.sizes, letters)
            if unified is not None and tensor.dtype.is_floating_point != role.boolean:
                yield from fill(tuple(rest), {**taken, role.name: place}, unified)
        if role.optional:
            yield from fill(tuple(rest), taken, letters)

    yield from fill(family.roles, {}, {})


def unify(dims: str, sizes: tuple[int, ...], letters: Mapping[str, int]) -> dict[str, int] | None:
    """``letters`` with those of ``dims``; None if the sizes are others."""
    if len(dims) != len(sizes):
        return None
    found = dict(letters)
    return (
        found if all(found.setdefault(letter, size) == size for letter, size in zip(dims, sizes, strict=True)) else None
    )


def sizes_fit(family: Family, letters: dict[str, int], result: tuple[int, ...]) -> bool:
    return unify(family.result, result, letters) == letters and all(
        letters[more] % letters[less] == 0 for more, less in family.multiples
    )


def agrees(function: Callable[..., Any], found: Recognised, length: int) -> bool:
    """Whether the function gives what the formula gives on ``length`` tokens drawn at random."""
    values = drawn(found, length)
    expected = computed(found, values, length)
    tolerance = with_rounding(TOLERANCE, torch.float32, found) * float(expected.abs().max().clamp(min=1.0))
    return bool(expected.isfinite().all()) and gives(function, found, values, expected, tolerance)


def agrees_scaled(function: Callable[..., Any], found: Recognised) -> bool:
    """Whether it also does so with the values of each role far from usual.

    Where the formula itself is out of range, or near its end, there is nothing to compare.
    """
    values = drawn(found, SCALED_LENGTH)
    for role, usual in values.items():
        for factor in FACTORS if usual.is_floating_point() else ():
            scaled = {**values, role: usual * factor}
            expected = computed(found, scaled, SCALED_LENGTH)
            largest = float(expected.abs().max())
            tolerance = with_rounding(SCALED_TOLERANCE, torch.float32, found) * largest
            if largest < LARGEST and not gives(function, found, scaled, expected, tolerance):
                return False
    return True


def gives(
    function: Callable[..., Any], found: Recognised, values: Mapping[str, Tensor], expected: Tensor, tolerance: float
) -> bool:
    """Whether the function gives ``expected`` ``[T, ...]`` of these values."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            got = only_tensor(function(**arguments(found, values)), found.signature, len(expected))
    except WRONG_CALL:
        return False  # the function does not take values like these in these roles
    return got is not None and got.shape == expected.shape and bool((got - expected).abs().max() <= tolerance)


def explains(found: Recognised, given: Mapping[str, Any], output: Tensor, *others: torch.dtype) -> bool:
    """Whether the formula gives what the function gave in a call that the model itself made, and in which it may have
    computed in ``others``."""
    got = output.float()
    with forced_implementation("reference"):
        expected = applied(found, [given[tensor.name] for tensor in found.signature.tensors]).float()
    # What it gives may have more bits than what it was given, and computed with.
    dtype = coarsest([output.dtype, *others, *(tensor.dtype for tensor in found.signature.tensors)])
    tolerance = with_rounding(TOLERANCE, dtype, found)
    return bool((got - expected).abs().max() <= tolerance * got.abs().max())


def applied(found: Recognised, tensors: Sequence[Tensor]) -> Tensor:
    """The formula of one request's ``tensors``, as the function takes them; and as it gives it."""
    values = {}
    for role, place in found.roles:
        dim = found.signature.tensors[place].token_dim
        values[role] = tensors[place] if dim is None else tensors[place][0].movedim(dim - 1, 0)
    length = next(len(values[role.name]) for role in found.family.roles if role.per_token)
    like = found.signature.result
    assert like.token_dim is not None
    return computed(found, values, length).to(like.dtype).movedim(0, like.token_dim - 1)[None]


def with_rounding(tolerance: float, dtype: torch.dtype, found: Recognised) -> float:
    """So much, or more where the function may round every intermediate value as far: to the model's dtype, or in
    products of float32 that are computed with fewer bits."""
    return max(tolerance, 8 * torch.finfo(rounded_as(dtype, found.signature.device)).eps)


def drawn(found: Recognised, length: int) -> dict[str, Tensor]:
    """Values by role, ``[length, ...]`` or of a weight's shape."""
    letters, generator = dict(found.letters), torch.Generator().manual_seed(length)
    taken = dict(found.roles)
    values = {}
    for role in found.family.roles:
        if role.name in taken:
            sizes = [letters[letter] for letter in role.dims]
            shape = [length, *sizes] if role.per_token else sizes
            own = torch.Generator().manual_seed(int(torch.randint(2**31, (1,), generator=generator, device="cpu")))
            values[role.name] = role.draw(shape, own).to(found.signature.device)
    return values


def arguments(found: Recognised, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """The values as the function takes them."""
    given = {name: as_given(value) for name, value in found.signature.constants}
    for role, place in found.roles:
        tensor = found.signature.tensors[place]
        given[tensor.name] = placed(values[role], tensor)
    return given


def placed(value: Tensor, like: TensorArgument) -> Tensor:
    """``[T, ...]`` brought to ``[1, ..., T, ...]``."""
    return value if like.token_dim is None else value.movedim(0, like.token_dim - 1)[None].contiguous()


def computed(found: Recognised, values: Mapping[str, Tensor], length: int) -> Tensor:
    device = found.signature.device
    with torch.no_grad():
        return found.family.run(
            **values,
            **dict(found.options),
            state_pool=None,
            cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32, device=device),
            context_lens=torch.tensor([length], dtype=torch.int32, device=device),
            state_slots=torch.zeros(1, dtype=torch.int64, device=device),
        )


def only_tensor(result: Any, signature: Signature, length: int) -> Tensor | None:
    """The result as ``[T, ...]``, if it has the shape that it had in the model's own call."""
    first = result[0] if isinstance(result, tuple) else result
    like = signature.result
    assert like.token_dim is not None
    shape = [length if dim == like.token_dim else size for dim, size in enumerate(like.shape)]
    if not isinstance(first, Tensor) or list(first.shape) != shape:
        return None
    return first[0].movedim(like.token_dim - 1, 0).float()
