"""The recurrences that have a ragged op, and how a model's own function may write each of them down.

A `Family` is a formula over tensors in named roles.  Every role has its dimensions by letter, and a way to draw values
for which the formula is well behaved; a model's function is compared with the formula on such values
(`recurrence_match`).  ``run`` is the formula itself, over the rows of all requests laid end to end: what was compared
is what runs.  T rows; the letters stand for the sizes behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import selective_compile.state_ops  # noqa: F401  (registers the operators)

Draw = Callable[[Sequence[int], torch.Generator], Tensor]  # of a shape
ops: Any = torch.ops.selective


def normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")


def decaying(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return -0.05 - uniform(shape, generator)


def short(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Vectors that a state stays bounded with, of several lengths: a formula that normalises them is another one."""
    directions = F.normalize(normal(shape, generator), dim=-1)
    return directions * (0.3 + 0.7 * uniform((*shape[:-1], 1), generator))


def gates(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Logarithms of factors that are kept in range by the largest so far, of many sizes."""
    return 10.0 + 5.0 * normal(shape, generator)


def seldom(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return uniform(shape, generator) < 0.2


@dataclass(frozen=True, kw_only=True)
class Role:
    """One input of a formula: ``dims`` are the sizes behind T, or all sizes where it is no value of a token."""

    name: str
    dims: str
    draw: Draw = normal
    per_token: bool = True
    optional: bool = False
    boolean: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """A recurrence.  ``run(**roles, **options, state_pool, cu_seqlens_q, context_lens, state_slots)`` -> ``[T, ...]``.
    One that ``reads_limits`` also takes which tokens they do not hold for, ``unlimited`` ``[T]`` bool.

    ``multiples``: the first letter's size is a multiple of the second's.  ``state``: the letters of what a request
    keeps, in float32; a small one is one more than the size that its capital stands for.  ``options``: the ways to
    write the formula that are tried.
    """

    name: str
    run: Callable[..., Tensor]
    roles: tuple[Role, ...]
    result: str
    state: str
    options: tuple[dict[str, Any], ...] = ({},)
    multiples: tuple[tuple[str, str], ...] = ()
    reads_limits: bool = False  # a pair of numbers that the function takes may be limits of the time step


def ragged(
    op: Any,
    varlen: Any,
    *tensors: Any,
    state_pool: Tensor | None,
    cu_seqlens_q: Tensor,
    context_lens: Tensor | None,
    state_slots: Tensor | None,
    **options: Any,
) -> Tensor:
    """The op over the requests' own states, or, where there is no pool of them, over requests that begin here."""
    if state_pool is None:
        return varlen(*tensors, cu_seqlens_q, **options)
    return op(*tensors, state_pool, cu_seqlens_q, context_lens, state_slots, **options)


def time_step(
    dt: Tensor,
    bias: Tensor | None,
    softplus: bool,
    limits: tuple[float, float] | None,
    unlimited: Tensor | None = None,
) -> Tensor:
    dt = dt.float()
    dt = dt if bias is None else dt + bias.float()
    dt = F.softplus(dt) if softplus else dt
    if limits is None:
        return dt
    limited = dt.clamp(*limits)
    return limited if unlimited is None else torch.where(unlimited[:, None], dt, limited)


def run_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    softplus: bool,
    limits: tuple[float, float] | None,
    unlimited: Tensor | None = None,
    **step: Any,
) -> Tensor:
    """Mamba-2 (Dao and Gu 2024, section 6): ``h = exp(dt A) h + dt x B``, ``y = h C + D x``."""
    steps = time_step(dt, dt_bias, softplus, limits, unlimited)
    return ragged(
        ops.ssd,
        ops.varlen_ssd,
        x.float(),
        steps,
        A.float(),
        B.float(),
        C.float(),
        None if D is None else D.float(),
        **step,
    )


def run_linear_attention(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, **step: Any) -> Tensor:
    """Linear attention with a decay (Qin et al. 2024, equation 5): ``S = exp(-slope) S + k v``, ``y = q S``."""
    steps = torch.ones(value.shape[:2], dtype=torch.float32, device=value.device)
    return ragged(
        ops.ssd, ops.varlen_ssd, value.float(), steps, -slopes.float(), key.float(), query.float(), None, **step
    )


def run_selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    softplus: bool,
    limits: tuple[float, float] | None,
    unlimited: Tensor | None = None,
    **step: Any,
) -> Tensor:
    """Mamba (Gu and Dao 2023, algorithm 2): `run_ssd` with a decay for each channel and state; ``y * silu(gate)``."""
    steps = time_step(dt, dt_bias, softplus, limits, unlimited)
    y = ragged(
        ops.selective_scan,
        ops.varlen_selective_scan,
        x.float(),
        steps,
        A.float(),
        B.float(),
        C.float(),
        None if D is None else D.float(),
        **step,
    )
    return y if gate is None else y * F.silu(gate.float())


def run_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    *,
    normalised: bool,
    scaled: bool,
    **step: Any,
) -> Tensor:
    """Gated delta rule (Yang et al. 2024, equation 10); with a decay for each key channel, Kimi delta attention."""
    query, key, value, decay, beta = (given.float() for given in (query, key, value, decay, beta))
    if normalised:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    scale = query.shape[-1] ** -0.5 if scaled else 1.0
    return ragged(ops.gated_delta_rule, ops.varlen_gated_delta_rule, query, key, value, decay, beta, scale, **step)


def run_wkv(
    time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, *, exponential: bool, **step: Any
) -> Tensor:
    """RWKV-4 (Peng et al. 2023, equation 16)."""
    decay = -torch.exp(time_decay.float()) if exponential else time_decay.float()
    return ragged(ops.wkv, ops.varlen_wkv, decay, time_first.float(), key.float(), value.float(), **step)


def run_mlstm(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    *,
    scaled: bool,
    eps: float,
    **step: Any,
) -> Tensor:
    """xLSTM's matrix memory (Beck et al. 2024, equations 19 to 27), with the factor of the key in the answer."""
    query, key, value = query.float(), key.float(), value.float()
    decay, scale = F.logsigmoid(forget_gate.float()), query.shape[-1] ** -0.5 if scaled else 1.0
    return ragged(ops.mlstm, ops.varlen_mlstm, query, key, value, input_gate.float(), decay, scale, eps, **step)


def run_linear_recurrence(decay: Tensor, update: Tensor, reset: Tensor | None = None, **step: Any) -> Tensor:
    """``h = decay * h + update``, as in RG-LRU (De et al. 2024, equation 4); a ``reset`` token forgets what was."""
    kept = decay.float() if reset is None else decay.float() * ~reset
    return ragged(ops.linear_recurrence, ops.varlen_linear_recurrence, kept, update.float(), **step)


def run_causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, **step: Any) -> Tensor:
    """Depthwise convolution over a token and the ones in front of it."""
    return ragged(ops.causal_conv1d, ops.varlen_causal_conv1d, x, weight, bias, silu=False, **step)


STEPS = tuple({"softplus": softplus} for softplus in (True, False))
EPSILONS = (1e-6, 1e-5, 1e-8, 1e-4, 0.0)  # added to what a sum is divided by: a number that functions may not be given
RULES = tuple({"normalised": n, "scaled": s} for n in (True, False) for s in (True, False))
DELTA: dict[str, Any] = {
    "run": run_gated_delta_rule,
    "result": "HV",
    "state": "HDV",
    "options": RULES,
    "multiples": (("H", "K"),),
}
QUERY, KEY = Role(name="query", dims="KD", draw=short), Role(name="key", dims="KD", draw=short)
VALUE, BETA = Role(name="value", dims="HV"), Role(name="beta", dims="H", draw=uniform)

FAMILIES: tuple[Family, ...] = (
    Family(
        name="ssd",
        run=run_ssd,
        roles=(
            Role(name="x", dims="HP"),
            Role(name="dt", dims="H", draw=uniform),
            Role(name="B", dims="GN"),
            Role(name="C", dims="GN"),
            Role(name="A", dims="H", draw=decaying, per_token=False),
            Role(name="D", dims="H", per_token=False, optional=True),
            Role(name="dt_bias", dims="H", per_token=False, optional=True),
        ),
        result="HP",
        state="HPN",
        options=STEPS,
        multiples=(("H", "G"),),
        reads_limits=True,
    ),
    Family(
        name="selective_scan",
        run=run_selective_scan,
        roles=(
            Role(name="x", dims="I"),
            Role(name="dt", dims="I", draw=uniform),
            Role(name="B", dims="N"),
            Role(name="C", dims="N"),
            Role(name="A", dims="IN", draw=decaying, per_token=False),
            Role(name="D", dims="I", per_token=False, optional=True),
            Role(name="dt_bias", dims="I", per_token=False, optional=True),
            Role(name="gate", dims="I", optional=True),
        ),
        result="I",
        state="IN",
        options=STEPS,
        reads_limits=True,
    ),
    Family(
        name="gated delta rule", roles=(QUERY, KEY, VALUE, Role(name="decay", dims="H", draw=decaying), BETA), **DELTA
    ),
    Family(
        name="gated delta rule by channel",
        roles=(QUERY, KEY, VALUE, Role(name="decay", dims="HD", draw=decaying), BETA),
        **DELTA,
    ),
    Family(
        name="wkv",
        run=run_wkv,
        roles=(
            Role(name="key", dims="C"),
            Role(name="value", dims="C"),
            Role(name="time_decay", dims="C", draw=decaying, per_token=False),
            Role(name="time_first", dims="C", per_token=False),
        ),
        result="C",
        state="C3",
        options=({"exponential": True}, {"exponential": False}),
    ),
    Family(
        name="mlstm",
        run=run_mlstm,
        roles=(
            QUERY,
            KEY,
            VALUE,
            Role(name="input_gate", dims="H", draw=gates),
            Role(name="forget_gate", dims="H"),
        ),
        result="HV",
        state="Hdv",
        options=tuple({"scaled": scaled, "eps": eps} for scaled in (True, False) for eps in EPSILONS),
    ),
    Family(
        name="linear recurrence",
        run=run_linear_recurrence,
        roles=(
            Role(name="decay", dims="C", draw=uniform),
            Role(name="update", dims="C"),
            Role(name="reset", dims="R", draw=seldom, optional=True, boolean=True),
        ),
        result="C",
        state="C",
    ),
)
# What passes find in a graph, each of its own form.
LINEAR_ATTENTION = Family(
    name="linear attention",
    run=run_linear_attention,
    roles=(
        Role(name="query", dims="HN"),
        Role(name="key", dims="HN"),
        Role(name="value", dims="HP"),
        Role(name="slopes", dims="H", per_token=False),
    ),
    result="HP",
    state="HPN",
)
CAUSAL_CONV1D = Family(
    name="causal convolution",
    run=run_causal_conv1d,
    roles=(
        Role(name="x", dims="C"),
        Role(name="weight", dims="CW", per_token=False),
        Role(name="bias", dims="C", per_token=False, optional=True),
    ),
    result="C",
    state="CP",  # P: one less than W
)
