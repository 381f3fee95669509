"""Drop-in generation: `generate` for one call, `wrap` for a model's own `generate`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from torch import nn
from transformers import GenerationConfig
from transformers.generation import BaseStreamer

from selective_compile.generate_arguments import check_model
from selective_compile.generate_by_requests import by_requests
from selective_compile.generate_requests import ENGINES
from selective_compile.model_facts import check, uncompiled
from selective_compile.options import EngineConfig
from selective_compile.self_served import self_served, why_of_model
from selective_compile.training_mode import evaluated


def generate(
    model: nn.Module,
    inputs: Any = None,
    generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    prefix_allowed_tokens_fn: Any = None,
    synced_gpus: bool | None = None,
    assistant_model: Any = None,
    streamer: BaseStreamer | None = None,
    negative_prompt_ids: Any = None,
    negative_prompt_attention_mask: Any = None,
    custom_generate: Any = None,
    *,
    input_ids: Any = None,
    attention_mask: Any = None,
    inputs_embeds: Any = None,
    token_type_ids: Any = None,
    seed: int | Sequence[int] | None = None,
    engine_config: EngineConfig | None = None,
    **kwargs: Any,
) -> Any:
    """`model.generate`, with every row a request of its own: no padding is computed, and rows that end leave.

    The model's engine is compiled at the first call and kept until the model is freed, with KV pools for the
    largest call so far. Calls from several threads share its steps.

    Args:
        model: a decoder; it is left as it is. One in training mode is in evaluation mode until the call ends, if that
            makes no other logits.
        inputs, input_ids: a tensor [B, S]; or a list of prompts of any lengths, each a list or a tensor of
            one dimension; or None for the begin-of-sequence id alone.
        generation_config: for all prompts, or for a list of prompts a list with one for each.
        attention_mask: [B, S], 0 for padding, which may be on any side; None: inferred as `model.generate`
            does.
        inputs_embeds: [B, S, hidden], the prompts in place of ids, as the model's input embedding gives them; with
            input_ids [B, S] these stand for them where processors look at the prompt, and in what is returned, which
            else has the new tokens alone. Models that make more of ids than to look up rows are refused.
        token_type_ids: [B, S] or [1, S], for a model whose forward takes them; new tokens have the type of their
            prompt's last one.
        logits_processor, stopping_criteria: with a list of prompts called for each by itself, [1, length] without
            padding; of several each gets a copy of the objects, so that none sees the calls for another. For a
            tensor of several rows, those of transformers' that look at one row alone are called likewise; with any
            other, which may tell rows apart, the call is one that the model serves itself.
        assistant_model: a smaller model of the same vocabulary, which drafts; the tokens are those without it.
        prefix_allowed_tokens_fn: gets the prompt's number, or the row's where transformers numbers these, and the ids.
        streamer: gets the prompts and then a token of every row in turn; of a list it takes a single prompt.
        seed: of sampling: one for each row that is generated, or a single one, to which row i adds i. None: drawn
            from torch's default generator, so that `torch.manual_seed` makes a call repeat its tokens. The tokens
            are not those that `model.generate` would draw.
        engine_config: None: that of `wrap`, or the defaults. Its max_kv_tokens None means as much as the call
            needs and the memory allows.
        kwargs: single fields of a GenerationConfig, which come first, and `tokenizer`, which stop strings need;
            and `json_schema`, `regex` or `grammar`, which the text of every row must follow, with `tokenizer`.
            `position_ids` [B, S] must number the tokens of each row from 0, which is what the engine does;
            `logits_to_keep`, `output_router_logits` and `labels` change nothing.
            All other arguments of `model.generate` must be None.

    Returns:
        For a tensor, [B, S + new] int64 on its device: the columns as given, then the new tokens, then
        `pad_token_id` (the first end-of-sequence id where it is not set). For a list, a list of tensors of
        one dimension: each prompt with its new tokens. With `num_return_sequences`, as many rows for each prompt.
        With `return_dict_in_generate`, these as `sequences` of a GenerateDecoderOnlyOutput, with `scores` and
        `logits` where they are asked for: of each step [B, V]; a row that has ended has 0 for `pad_token_id`
        there and -inf for all else. `hidden_states` and `attentions` come from the model's own loop over the finished
        sequences, padded on the left, and with them, with `inputs_embeds`, or where the call has `use_cache=True`, does
        the cache: such a call takes as long as `model.generate` besides. With `num_beams` above 1, in a
        GenerateBeamDecoderOnlyOutput, with `sequences_scores` (where scores are asked for) and `beam_indices`.

    A few calls the model serves itself, in transformers' own loop, which is logged: `self_served` has which and why.
    With `EngineConfig(fallback=...)` of anything but "sequential" they are refused.

    Raises:
        ValueError: an argument that is wrong or not supported, or a model that cannot be rewritten.
        RuntimeError: a step failed.
        What one of the call's own processors or criteria raises.
    """
    model = uncompiled(model)
    check_model(model)
    config = _config_given(engine_config, "engine_config") or _config_of(model)
    named = {
        "inputs": inputs,
        "generation_config": generation_config,
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
        "synced_gpus": synced_gpus,
        "assistant_model": assistant_model,
        "streamer": streamer,
        "negative_prompt_ids": negative_prompt_ids,
        "negative_prompt_attention_mask": negative_prompt_attention_mask,
        "custom_generate": custom_generate,
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "inputs_embeds": inputs_embeds,
        "token_type_ids": token_type_ids,
    }
    given = {name: value for name, value in named.items() if value is not None} | kwargs
    own, by_model = _own_generate(model), None
    if own is not None and not isinstance(input_ids if inputs is None else inputs, (list, tuple)):
        by_model = partial(self_served, model, own, given, refuse=config.fallback != "sequential", seed=seed)
    if (reason := why_of_model(model, given)) is not None:
        if by_model is not None:
            return by_model(reason)
        check(model)
        raise ValueError(f"a call must be for a tensor, of a model that has a generate method: {reason}")
    with evaluated(model):
        check(model)
        return by_requests(model, config, by_model, seed, given)


class BatchedGenerate:
    """What `wrap` puts in the place of a model's `generate`; in a copy of the model, it is the copy's."""

    def __init__(self, model: nn.Module, config: EngineConfig, previous: dict[str, Any]) -> None:
        # Weak, or the model would hold itself, and be freed only when Python looks for cycles.
        self._model = weakref.ref(model)
        self.config = config
        self.previous = previous

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return generate(self._wrapped(), *args, **{"engine_config": self.config, **kwargs})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._wrapped(), self.config, self.previous)

    def _wrapped(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ReferenceError(
                "the wrapped model must be alive, got one that was freed: its generate does not hold it, so keep it, "
                "as in model = sc.wrap(...); model.generate(...)"
            )
        return model


def wrap(model: nn.Module, config: EngineConfig | None = None) -> nn.Module:
    """Have the model's own `generate` serve its rows as requests; returns the model.

    Only `generate` of this one object changes. It works inside a `transformers.pipeline`.

    Args:
        config: of the engine; None takes the defaults.

    Raises:
        ValueError: it has no `generate`, or is wrapped already; or `config` is no `EngineConfig`.
    """
    if not isinstance(model, nn.Module) or not callable(getattr(model, "generate", None)):
        raise ValueError(f"model must be a torch.nn.Module with a generate method, got {type(model).__name__}")
    inner = uncompiled(model)
    own, given = vars(inner), _config_given(config, "config")
    if isinstance(own.get("generate"), BatchedGenerate):
        raise ValueError("model must not be wrapped already, got one that is; call unwrap first")
    previous = {"generate": own["generate"]} if "generate" in own else {}
    own["generate"] = BatchedGenerate(inner, given or EngineConfig(), previous)
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """Undo `wrap`, and free the model's engine with its KV pools, also where `sc.generate` alone has made one; returns
    the model.

    Raises:
        ValueError: it is no model, it is not wrapped and has no engine, or something else took the place of its
            `generate` since.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    inner = uncompiled(model)
    own = vars(inner)
    wrapper = own.get("generate")
    if isinstance(wrapper, BatchedGenerate):
        del own["generate"]
        own.update(wrapper.previous)
        ENGINES.drop(inner)
    elif wrapper is not None or not ENGINES.drop(inner):
        raise ValueError("model must be wrapped, got one whose generate is not that of wrap")
    return model


@contextmanager
def wrapped(model: nn.Module, config: EngineConfig | None = None) -> Iterator[nn.Module]:
    """`wrap` for the length of a `with` block.

    Raises:
        ValueError: as `wrap`.
    """
    wrap(model, config)
    try:
        yield model
    finally:
        unwrap(model)


def _config_given(value: object, name: str) -> EngineConfig | None:
    """Raises ValueError for what is neither a configuration nor None, or one of an engine of its own."""
    if value is not None and not isinstance(value, EngineConfig):
        raise ValueError(f"{name} must be an EngineConfig or None, got {value!r}")
    if value is not None and value.record is not None:
        raise ValueError(
            f"EngineConfig.record must be None in {name}, got {str(value.record)!r}: a larger call has another engine, "
            "which would begin the log anew; make an sc.Engine"
        )
    return value


def _own_generate(model: nn.Module) -> Callable[..., Any] | None:
    """What the model's `generate` was before `wrap`, or that of its class; None: that is neither transformers' nor
    PEFT's, and may take other arguments, or end here."""
    wrapper = vars(model).get("generate")
    if isinstance(wrapper, BatchedGenerate) and "generate" in wrapper.previous:
        return cast(Callable[..., Any], wrapper.previous["generate"])
    of_class: Any = getattr(type(model), "generate", None)
    known = getattr(of_class, "__module__", "").partition(".")[0] in ("transformers", "peft")
    return partial(of_class, model) if known else None


def _config_of(model: nn.Module) -> EngineConfig:
    own = vars(model).get("generate")
    return own.config if isinstance(own, BatchedGenerate) else EngineConfig()
