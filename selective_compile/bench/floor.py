"""The least time in which the machine could have done the steps that the engine did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedModel

from selective_compile.bench.ceilings import Ceilings
from selective_compile.choices import KvDtype
from selective_compile.int8_rows import row_bytes
from selective_compile.runtime.stats import StepFloor, StepRecord


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step costs, per token and per sampled row.

    Attributes:
        weight_bytes: of the layers' matrices, but for those of experts, read in every step. Of the input embedding only
            rows are read.
        head_bytes: of the LM head, be it the input embedding too; read in every step that samples a token.
        flops_per_token: two for every element of the layers' matrices that a token is multiplied with.
        flops_per_row: of the LM head, which runs on sampled rows only.
        flops_per_pair: of attention, for every pair of a token and one it attends to.
        kv_bytes_per_token: keys and values of one token in all layers.
        expert_bytes: of one expert, in all layers together; 0: there are none.
        experts, chosen: how many experts a layer has, and how many of them a token goes to.
    """

    weight_bytes: int
    head_bytes: int
    flops_per_token: int
    flops_per_row: int
    flops_per_pair: int
    kv_bytes_per_token: int
    expert_bytes: int = 0
    experts: int = 0
    chosen: int = 0

    @classmethod
    def of(cls, model: PreTrainedModel, kv_dtype: KvDtype = "auto") -> Self:
        """Of a model with one kind of attention, as the benchmark's, with experts that lie in one tensor [E, N, K] or
        without; `kv_dtype` as in `EngineConfig`."""
        head, config = model.get_output_embeddings().weight, model.config
        matrices = sum(p.numel() for p in model.base_model.layers.parameters() if p.ndim == 2)
        experts = int(getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0) or 0)
        chosen = int(config.num_experts_per_tok) if experts else 0
        stacked = [p for p in model.base_model.layers.parameters() if p.ndim == 3 and len(p) == experts]
        expert = sum(p.numel() for p in stacked) // max(experts, 1)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        itemsize = model.dtype.itemsize
        row = {"int8": row_bytes(size), "fp8": size}.get(kv_dtype, size * itemsize)
        return cls(
            weight_bytes=matrices * itemsize,
            head_bytes=head.numel() * itemsize,
            flops_per_token=2 * (matrices + chosen * expert),
            flops_per_row=2 * head.numel(),
            flops_per_pair=4 * config.num_hidden_layers * config.num_attention_heads * size,
            kv_bytes_per_token=2 * config.num_hidden_layers * config.num_key_value_heads * row,
            expert_bytes=expert * itemsize,
            experts=experts,
            chosen=chosen,
        )


def experts_hit(experts: int, chosen: int, tokens: int) -> float:
    """How many experts so many tokens are expected to go to, each to `chosen` of them, all as likely."""
    return experts * (1 - (1 - chosen / experts) ** tokens) if experts else 0.0


class Roofline:
    """The floor of a step: the larger of bytes over bandwidth and operations over rate.

    Of experts those are read that so many tokens can be expected to go to. Keys and values are read once for each
    request and step. Those of a shared prefix too: they are computed once, by the request that did so, but each of the
    others attends to them by itself.
    """

    def __init__(self, work: Work, ceilings: Ceilings) -> None:
        self._work = work
        self._ceilings = ceilings

    def __call__(self, record: StepRecord) -> StepFloor:
        work = self._work
        tokens = sum(share.tokens for share in record.shares)
        moved, flops = work.weight_bytes + work.expert_bytes * experts_hit(work.experts, work.chosen, tokens), 0
        if any(share.samples for share in record.shares):
            moved += work.head_bytes
        for share in record.shares:
            pairs = share.tokens * share.start + share.tokens * (share.tokens + 1) // 2
            moved += work.kv_bytes_per_token * (share.start + share.tokens)
            flops += work.flops_per_token * share.tokens + work.flops_per_pair * pairs
            flops += work.flops_per_row * share.samples
        reading, computing = moved / self._ceilings.bytes_per_second, flops / self._ceilings.flops_per_second
        return StepFloor(max(reading, computing), "memory" if reading >= computing else "compute")


def floor_seconds(records: Sequence[StepRecord], work: Work, ceilings: Ceilings) -> float:
    """The sum over steps of max(bytes / bandwidth, flops / rate)."""
    roofline = Roofline(work, ceilings)
    return sum(roofline(record).seconds for record in records)
