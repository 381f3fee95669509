"""The requests of one call of `generate`: submitted, streamed, and driven to their end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from transformers.generation import BaseStreamer

from selective_compile.generate_call import GenerateCall
from selective_compile.generate_prompts import Prompts
from selective_compile.hole_trial import counts_holes
from selective_compile.kept_engines import KeptEngines
from selective_compile.model_facts import declared_positions
from selective_compile.options import EngineConfig
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.own_code import cause_of
from selective_compile.runtime.processors import samples_have_one_number
from selective_compile.runtime.request import Request
from selective_compile.runtime.request_result import RequestResult
from selective_compile.runtime.samples import Asked

# A function with the arguments of `model.generate` has no other place for what it compiled, since the model
# object stays as it is. Nothing in here outlives its model.
ENGINES: Final = KeptEngines()

# They look at the ids of a prompt, and with embeddings have no effect, as for `model.generate`.
OF_PROMPT_IDS = ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size")


# Inference mode would make the pools, which are kept, tensors that no call outside of it can write to.
@torch.inference_mode(False)
@torch.no_grad()
def finished_requests(
    model: nn.Module,
    config: EngineConfig,
    call: GenerateCall,
    seeds: Sequence[int],
) -> list[RequestResult]:
    """The result of each prompt, from the engine that is kept for the model.

    Raises:
        ValueError: one of the prompts or its fields is wrong; none of them is served then.
        RuntimeError: a step failed, or the call's own processors or criteria did.
    """
    prompts, max_positions = call.prompts, declared_positions(model)
    counts = [
        each.new_tokens(prompts.width_of(number, counted=each["max_length"] is not None), max_positions)
        for number, each in enumerate(call.fields)
    ]
    lengths = [
        len(row) + count
        for row, count, each in zip(prompts.rows, counts, call.fields, strict=True)
        for _ in range(each.num_beams)
    ]
    if prompts.embeds is None and prompts.types is None:
        engine = ENGINES.engine_for(model, config, lengths)
        refuse_holes(model, engine, prompts)
        return _served(engine, call, counts, seeds)
    # Samples of a prompt share its rows.
    first = {id(row): number for number, row in reversed([*enumerate(prompts.rows)])}
    own = sorted(first.values())
    rows = [prompts.rows[number] for number in own] if prompts.embeds is not None else []
    with ENGINES.lent(model, config, rows, with_types=prompts.types is not None) as (kept, lent):
        ids = dict(zip(own, lent.ids if rows else [prompts.rows[number] for number in own], strict=True))
        if prompts.types is not None:
            ids = {number: kept.typed(ids[number], prompts.types_of(number, kept.num_types)) for number in own}
        known = replace(call, prompts=replace(prompts, rows=[ids[first[id(row)]] for row in prompts.rows]))
        salt, engine = lent.salt if rows else None, kept.engine_for(lengths)
        refuse_holes(model, engine, prompts)
        return _served(engine, known, counts, seeds, salt)


def refuse_holes(model: nn.Module, engine: Engine, prompts: Prompts) -> None:
    """Raises ValueError for padding between tokens that would count to the model itself."""
    if prompts.holes and (engine.counts_padding or counts_holes(model)):
        raise ValueError(
            "attention_mask must have its ones side by side in each row of a model with windows, recurrent layers, "
            "modules that run by themselves or positions that count padding, got zeros between them"
        )


def _served(
    engine: Engine, call: GenerateCall, counts: Sequence[int], seeds: Sequence[int], salt: str | None = None
) -> list[RequestResult]:
    """`counts` of new tokens for each of the prompts; `salt`: under which they are known, with embeddings."""
    prompts = call.prompts
    if engine.prefix and prompts.mask is not None and not bool(prompts.mask.all()):
        raise ValueError(
            f"attention_mask must be all ones for a model whose first {engine.prefix} tokens see one another, as "
            "generate counts padding among them, got zeros: prompts of different lengths may come as lists"
        )
    requests: list[Request] = []
    call, criteria = call.criteria_apart()
    try:
        for row, numbers in _samples(prompts, engine.config.max_requests):
            asked, first = [_asked(call, number, counts[number], seeds[number]) for number in numbers], numbers[0]
            known: dict[str, Any] = {"cache_salt": salt}
            if prompts.embeds is not None or prompts.types is not None:
                known |= {"shown": prompts.seen(first), "id_offset": prompts.id_offset(first)}
            try:
                requests += engine.submit_samples(row, asked, **known)
            except ValueError as error:
                if len(call.fields) == 1:
                    raise
                raise ValueError(f"prompt {prompts.numbers[first] if prompts.numbers else first}: {error}") from error
        if call.streamer is not None:
            stream(requests, prompts, call.streamer, call.fields[0].pad_token_id)
        if criteria is None:
            return [_result(request) for request in requests]
        criteria.read(requests, [_tokens(request) for request in requests])
        return [criteria.result_of(row, _result(request)) for row, request in enumerate(requests)]
    finally:
        for request in requests:
            request.cancel()


def _asked(call: GenerateCall, number: int, count: int, seed: int) -> Asked:
    """The row of that number, of so many new tokens."""
    prompts, fields = call.prompts, call.fields[number]
    seen, of_embeddings = len(prompts.seen(number)), prompts.embeds is not None
    options = fields.options(prompts.width_of(number) - seen, of_embeddings=of_embeddings)
    padding = prompts.width_of(number, counted=False) - seen
    told = prompts.numbers[number] if prompts.numbers and samples_have_one_number() else number
    options |= call.objects.options(number, len(call.fields), padding, fields.num_beams, told=told)
    options |= {"max_new_tokens": count, "seed": seed}
    if of_embeddings:
        options |= dict.fromkeys(OF_PROMPT_IDS)
    return Asked(config=fields.config, options=options)


def _samples(prompts: Prompts, most: int) -> Iterator[tuple[Any, list[int]]]:
    """Each prompt with the numbers of its rows, which follow each other, at most so many."""
    first = 0
    for _, group in itertools.groupby(prompts.rows, key=id):
        rows = list(group)
        for start in range(0, len(rows), most):
            part = rows[start : start + most]
            yield part[0], list(range(first, first + len(part)))
            first += len(part)


def stream(requests: Sequence[Request], prompts: Prompts, streamer: BaseStreamer, pad: int | None) -> None:
    """As `model.generate` does: the prompts [B, S], a token of each [B] in turn, and the end.

    A row that has ended gives `pad` while others go on.
    """
    columns = torch.tensor([requests[0].prompt_ids], device="cpu") if prompts.columns is None else prompts.columns.cpu()
    streamer.put(columns)
    for tokens in itertools.zip_longest(*map(_tokens, requests), fillvalue=pad):
        streamer.put(torch.tensor(tokens, device="cpu"))
    streamer.end()


def _tokens(request: Request) -> Iterator[int]:
    """Raises as `_result`."""
    try:
        yield from request
    except RuntimeError as error:
        raise error.__cause__ or error from None


def _result(request: Request) -> RequestResult:
    """Raises what code that came with the call raised, as `model.generate` does; RuntimeError: of anything else."""
    result = request.result()
    if result.finish_reason == "error":
        raise cause_of(result.error) or RuntimeError(result.error)
    return result
