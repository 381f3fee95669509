"""Hidden states, attentions and the cache of a call, as `model.generate` returns them.

They come from the model's own loop, run once more over the tokens that the engine has generated, so that they have the
shapes and the meaning that they have there for every kind of layer. Such a call costs what `model.generate` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from selective_compile.generate_fields import STATES, Fields
from selective_compile.generate_prompts import Prompts
from selective_compile.module_state import lock_of
from selective_compile.options import EngineConfig
from selective_compile.runtime.request_result import RequestResult

# By what name a call returns it; the second until transformers 5.24.
CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"


# With other values than these an engine computes otherwise than the model.
INEXACT = {"max_attention_window": None, "kv_dtype": "auto", "weights": "model"}


@dataclass(frozen=True, kw_only=True)
class _Paths:
    """The sequences to run over, R of them.

    Attributes:
        rows: of each the number of its prompt, and its generated tokens.
        steps: for each step the places in `rows` of what is returned; -1 for a search that has ended.
        last: those of the rows whose cache is returned.
    """

    rows: list[tuple[int, Sequence[int]]]
    steps: list[list[int]]
    last: list[int]


def check_states(model: nn.Module, prompts: Prompts, fields: Sequence[Fields], config: EngineConfig) -> None:
    """Refuse before anything is generated what hidden states, attentions and the cache do not go with.

    Raises:
        ValueError: a list of prompts, an attention implementation that keeps no attentions, or an engine that computes
            otherwise than the model.
    """
    check_inexact(fields[0], config, of_embeddings=prompts.embeds is not None)
    for name in STATES:
        if any(each.states()[name] for each in fields):
            if prompts.columns is None:
                raise ValueError(f"{name} must be False for a list of prompts, which have no common length; pad them")
            if not all(each.states()[name] for each in fields):
                raise ValueError(f"{name} must be the same for all prompts, got both")
            kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
            if name == "output_attentions" and kind not in (None, "eager"):
                raise ValueError(
                    f"output_attentions must be False for a model with {kind!r} attention, got True; "
                    "loaded with attn_implementation='eager', or mostly by model.set_attn_implementation('eager'), it "
                    "keeps them"
                )


def check_inexact(fields: Fields, config: EngineConfig, *, of_embeddings: bool) -> None:
    """Raises ValueError where the model's own loop would give other states than those that tokens came of."""
    wanted = fields.states() | {"use_cache": fields.returns_cache(of_embeddings=False)}
    wanted["return_dict_in_generate"] = fields.returns_cache(of_embeddings=of_embeddings)
    name = next((name for name, asked in wanted.items() if asked), None)
    for option, exact in INEXACT.items():
        if name is not None and getattr(config, option) != exact:
            raise ValueError(
                f"{name} must be left out with EngineConfig({option}={getattr(config, option)!r}), got True; what is "
                "returned comes of the model's own loop, which computes without that"
            )


def states_of(
    model: nn.Module, prompts: Prompts, results: Sequence[RequestResult], fields: Sequence[Fields]
) -> dict[str, Any]:
    """`hidden_states` and `attentions` as far as a call asks for them, and with them, or where it has `use_cache=True`,
    the `CACHE`.

    For each step a tuple of layers: of hidden states [B, S, hidden] for the prompts and [B, 1, hidden] after that; of
    attentions [B, H, S, S] and [B, H, 1, length]. Prompts are padded on the left, however they came. With beams B is
    that of all beams of the step.
    """
    wanted = any(any(each.states().values()) for each in fields)
    cached = fields[0].returns_cache(of_embeddings=prompts.embeds is not None)
    if prompts.columns is None or prompts.mask is None or not (wanted or cached):
        return {}
    paths = _paths_of(results, fields[0].pad_token_id)
    numbers = torch.tensor([number for number, _ in paths.rows], device="cpu")
    order = prompts.mask.to(torch.uint8).argsort(dim=1, stable=True)  # padding first
    columns, embeds = prompts.columns, prompts.embeds
    columns = (columns.gather(1, order) if columns.shape[1] else columns)[numbers.to(order.device)]
    mask = prompts.mask.gather(1, order)[numbers.to(order.device)]
    if embeds is not None:
        places = order.to(embeds.device)[:, :, None].expand_as(embeds)
        embeds = embeds.gather(1, places)[numbers.to(embeds.device)]
    types = prompts.types
    if types is not None:
        types = types.gather(1, order.to(types.device))[numbers.to(types.device)]
    given = {name: each for name, each in (("inputs_embeds", embeds), ("token_type_ids", types)) if each is not None}
    found = _run_over(model, columns, given, mask, [tokens for _, tokens in paths.rows], fields[0])
    if all(result.hypotheses is None for result in results):
        return found
    for name in ("hidden_states", "attentions"):
        if found[name] is not None:
            found[name] = tuple(
                tuple(_at(layer, rows) for layer in step) for step, rows in zip(found[name], paths.steps, strict=True)
            )
    if found[CACHE] is not None:
        last = torch.tensor(paths.last, device=columns.device)
        found[CACHE] = _reordered(model, found[CACHE], last)
    return found


def _reordered(model: Any, cache: Any, rows: Tensor) -> Any:
    """As `generate` does it: some models have a way of their own, for caches of their own."""
    if hasattr(model, "_reorder_cache"):
        return model._reorder_cache(cache, rows)
    cache.reorder_cache(rows)
    return cache


def _paths_of(results: Sequence[RequestResult], pad: int | None) -> _Paths:
    longest = max(len(result.tokens) if result.beams is None else len(result.beams) - 1 for result in results)
    rows: list[tuple[int, Sequence[int]]] = []
    steps: list[list[int]] = [[] for _ in range(longest)]
    last: list[int] = []
    for number, result in enumerate(results):
        if result.beams is None:
            rows.append((number, result.tokens))
        else:
            _add_beams(number, [each.tolist() for each in result.beams], rows, steps, last)
    fill = [0 if pad is None else pad]
    return _Paths(
        rows=[(number, [*tokens, *fill * (longest - len(tokens))]) for number, tokens in rows], steps=steps, last=last
    )


def _add_beams(
    number: int,
    beams: list[list[list[int]]],
    rows: list[tuple[int, Sequence[int]]],
    steps: list[list[int]],
    last: list[int],
) -> None:
    """The beams of one search are a tree; each of its ends makes a row, and what leads there is in that row."""
    places: dict[tuple[int, ...], int] = {}
    for step in reversed(range(len(beams))):
        for beam in beams[step]:
            if tuple(beam) not in places:
                for length in range(len(beam) + 1):
                    places.setdefault(tuple(beam[:length]), len(rows))
                rows.append((number, beam))
    for step, found in enumerate(steps):
        found += [places[tuple(beam)] for beam in beams[step]] if step < len(beams) - 1 else [-1] * len(beams[0])
    last += [places[tuple(beam[: len(steps) - 1])] for beam in beams[-1]]


def _at(layer: Tensor, rows: list[int]) -> Tensor:
    places = torch.tensor(rows, device=layer.device)
    found = layer[places.clamp(min=0)]
    found[places < 0] = 0
    return found


class _LoopConfig(GenerationConfig):
    """Of a loop that ends after so many steps. Stop strings, which `generate` takes from the model's own configuration
    where there are none, would ask for a tokenizer, which a loop of one's own has no way to bring."""

    @property
    def stop_strings(self) -> None:
        return None

    @stop_strings.setter
    def stop_strings(self, given: Any) -> None:
        pass


class _Forced(LogitsProcessor):
    """Only the token that is known to come is possible. `tokens` is [R, steps], after `width` columns of prompt."""

    def __init__(self, tokens: Tensor, width: int) -> None:
        self._tokens = tokens
        self._width = width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self._width
        return torch.full_like(scores, -torch.inf).scatter_(1, self._tokens[:, step : step + 1], 0.0)


def _run_over(
    model: nn.Module,
    columns: Tensor,
    given: Mapping[str, Tensor],
    mask: Tensor,
    tokens: Sequence[Sequence[int]],
    fields: Fields,
) -> dict[str, Any]:
    """The model's own loop over columns [R, S], and what else is `given` of the prompts, and then `tokens`, R of one
    length.
    """
    forced = columns.new_tensor(tokens)
    width, steps = columns.shape[1], forced.shape[1]
    cached = fields["use_cache"]
    config = _LoopConfig(
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        max_new_tokens=steps,
        pad_token_id=fields.pad_token_id,
        use_cache=True if cached is None else cached,
        cache_implementation=fields["cache_implementation"],
        disable_compile=True,
        return_dict_in_generate=True,
        **fields.states(),
    )
    with lock_of(model):
        # Of the class: the model's own may be the one that `wrap` put there.
        found = cast(Any, type(model)).generate(
            model,
            columns,
            attention_mask=mask.long(),
            **given,
            generation_config=config,
            custom_generate=_forced_loop(_Forced(forced, width), width + steps),
        )
    assert torch.equal(found.sequences[:, width:], forced), "the loop took other tokens than it was given"
    return {name: getattr(found, name) for name in ("hidden_states", "attentions", CACHE)}


def _forced_loop(processor: LogitsProcessor, length: int) -> Callable[..., Any]:
    """What `custom_generate` takes: nothing but `processor` chooses, and nothing but the length ends it."""

    def loop(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        ends = StoppingCriteriaList([MaxLengthCriteria(length)])
        return model._sample(input_ids, LogitsProcessorList([processor]), ends, generation_config, **kwargs)

    return loop
