"""The last resort: the whole model, one request after another, as `generate` itself would run it.

A model in which something could not be proved still gives the same tokens as Hugging Face's: each request has the cache
that `generate` prepares for it, and steps the model by `generate`'s own preparation of inputs.  Nothing is batched.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from selective_compile.live_settings import HOOK, hook_refusals, without_hooks
from selective_compile.model_call import own_call
from selective_compile.model_facts import declared_positions, device_of, known_ids
from selective_compile.module_state import (
    Place,
    State,
    deep_copy,
    itself,
    lock_of,
    own_attributes,
    unchanged,
    watched_objects,
)
from selective_compile.own_generation import generate_of_transformers
from selective_compile.passes import Refusal, RefusedError
from selective_compile.step import StepInputs
from selective_compile.tensor_state import States, states
from selective_compile.watched_buffers import WatchedBuffers

# Stands as the operator of what calls change, and read, that no request can have of its own.
OUTSIDE: Final = "state outside of the modules"


@dataclass(kw_only=True)
class OneRequest:
    """One request: the tokens so far and, once the model has seen some, what `generate` hands from step to step.

    ``begun``: how many tokens its first call had, 0 before that; each one behind it has another one.
    ``use_cache``: as `generate` is asked for; None: as it does by itself.
    """

    tokens: Tensor  # [1, length] int64
    begun: int = 0
    use_cache: bool | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    state: State = field(default_factory=dict)
    seen: int = 0

    def copy(self, model: nn.Module) -> OneRequest:
        """Another one that is as far, with a cache of its own."""
        kwargs, state = deep_copy(model, (self.kwargs, self.state))
        return replace(self, tokens=self.tokens.clone(), kwargs=kwargs, state=state)


class SequentialProgram:
    """Callable on `StepInputs` as `StepProgram` is; it needs no pools.

    A prompt is run whole, in the step that asks for its logits: a model with recurrent layers cannot always go on in
    the middle of one. No request is to be preempted for memory; one that begins again, since weights have changed,
    makes the calls that it made before: of a model that is not causal, a prompt and what was generated from it are not
    the same as a longer prompt.
    """

    graphs = 0
    counts_padding = True
    keeps_requests = True
    forks_requests = True
    gives_every_row = False
    cut_up_to = None
    prefix = 0
    pauses = False
    rewinds = False  # nor are there rows for more than a request's last token
    call_sites: tuple[Any, ...] = ()
    state_sites: tuple[Any, ...] = ()
    long_form = None
    marks_positions = unlimited_steps = False
    isolated: Mapping[str, Refusal] = MappingProxyType({})
    not_captured = "the whole model runs as it is, one request after another"

    def __init__(self, model: Any, refusals: Sequence[Refusal], *, use_cache: bool | None = None) -> None:
        """``use_cache``: of all requests, as in `OneRequest`; None: each may say it itself.

        Raises `RefusedError` if a run changes an object in the model, or anything outside of it that it reads, that
        cannot be kept for each request."""
        self.refusals, self._use_cache = tuple(refusals), use_cache
        if any(refusal.operator == OUTSIDE for refusal in refusals):  # of which requests beside one another have one
            raise RefusedError(refusals)
        self._model_alive = weakref.ref(itself(model))  # engines hold theirs; those of `generate` must not
        self.device = next(model.parameters()).device
        self.max_positions = declared_positions(model)
        self._requests: dict[Hashable, OneRequest] = {}
        self._failed: dict[Hashable, Exception] = {}
        self._seen: States | None = None
        self._lock = lock_of(model)
        with (
            self._lock,
            torch.no_grad(),
            without_hooks(model),
            unchanged(model) as written,
            watched_objects(model) as changed,
        ):
            self._tables = tables_of(model)
            self.vocab_size = self._tried(model)
        self.num_ids = self.known_ids = min(self.vocab_size, known_ids(model) or self.vocab_size)
        self._buffers = WatchedBuffers(model, written, hooks=bool(hook_refusals(model)))
        if changed:
            kept = [kept_in_object(model, *place) for place in sorted(changed)]
            raise RefusedError([*refusals, *(refusal for refusal in kept if refusal not in refusals)])

    @property
    def _model(self) -> Any:
        model = self._model_alive()
        if model is None:
            raise ReferenceError("the model must be alive, got one that was freed")
        return model

    def _tried(self, model: Any) -> int:
        """The number of logits, by two steps of two requests each.  No token is another's, as far as there are so many,
        nor what buffers mostly hold at first: what a run leaves of them in a buffer is another value, also where
        PyTorch does not count it."""
        for ids in (torch.arange(1, 7, device=self.device) % (known_ids(model) or 7)).view(2, 1, 3):
            one = OneRequest(tokens=ids[:, :2], use_cache=self._use_cache)
            self._logits(model, one)
            one.tokens = ids
            found = len(self._logits(model, one))
        return found

    def serves(self, model: nn.Module) -> bool:
        """Whether it runs this very object, or what stands for it."""
        return self._model_alive() is itself(model)

    def is_of(self, model: nn.Module) -> bool:
        """Whether a model with other hooks would still be run so: if hooks are why it is, they must be there."""
        return bool(hook_refusals(model)) == any(refusal.node == HOOK for refusal in self.refusals)

    def weights_version(self) -> States:
        """Of each weight, and of each buffer that runs only read; see `States`.

        Raises:
            ValueError: the tables of embeddings have other sizes than at first, as from `resize_token_embeddings`.
        """
        with self._lock:  # a run may have put other modules into the model
            model = self._model
            seen = states([*model.parameters(), *self._buffers.others(model).values()], self._seen)
            if seen is not self._seen and (found := tables_of(model)) != self._tables:
                raise ValueError(f"the model's tables of embeddings must stay {self._tables}, got {found}")
            self._seen = seen
            return seen

    def look_closely(self) -> None:
        """It runs the model itself, as that is."""

    def forget_weights(self) -> None:
        """Nothing is kept of their values."""

    def forget(self, request: Hashable) -> None:
        """Let go of the cache of a request that has left, if it is in a step that runs, when that has run."""
        self._requests.pop(request, None)

    def go_on_from(self, requests: Sequence[Hashable], parents: Sequence[Hashable]) -> None:
        """Give each request the cache of its parent, in place of its own: the first of a parent's that very one."""
        caches = [self._requests[parent] for parent in parents]
        taken: set[int] = set()
        for request, one in zip(requests, caches, strict=True):
            self._requests[request] = one.copy(self._model) if id(one) in taken else one
            taken.add(id(one))

    @torch.no_grad()
    def __call__(
        self, inputs: StepInputs, pools: Sequence[tuple[Tensor, Tensor]], states: Sequence[Tensor] = ()
    ) -> Tensor:
        """Logits ``[R, V]`` of ``inputs.logit_rows``, each the last row of its request in this step; zeros where the
        request's run raises, see `take_failed`."""
        bounds = inputs.cu_seqlens_q.tolist()
        wanted = {row: place for place, row in reversed(list(enumerate(inputs.logit_rows.tolist())))}
        logits = torch.zeros(len(inputs.logit_rows), self.vocab_size, dtype=torch.float32, device=self.device)
        model = self._model
        with self._lock, self._buffers.no_others_written(model):
            own = self._buffers.written(model)
            for request, first, end in zip(inputs.requests, bounds, bounds[1:], strict=False):
                one = self._advanced(request, inputs.input_ids[first:end], int(inputs.positions[first]))
                if one is None or end - 1 not in wanted:
                    continue
                try:
                    logits[wanted[end - 1]] = self._logits(model, one, own)
                except Exception as error:  # noqa: BLE001 - a model raises anything, of this request alone
                    self._failed[request] = error
                    self.forget(request)
        return logits

    def take_failed(self) -> dict[Hashable, Exception]:
        """The requests whose runs have raised since this was called last, and what."""
        found, self._failed = self._failed, {}
        return found

    def _advanced(self, request: Hashable, ids: Tensor, position: int) -> OneRequest | None:
        """None: it was cancelled since the step was put together."""
        one = self._requests.get(request)
        if position == 0:
            begun, use_cache = 0 if one is None else one.begun, self._use_cache
            use_cache = getattr(request, "use_cache", None) if use_cache is None else use_cache
            # A copy, for the next step's ids take their place.
            one = self._requests[request] = OneRequest(tokens=ids[None].clone(), begun=begun, use_cache=use_cache)
        elif one is not None:
            assert one.tokens.shape[1] == position, "a request goes on where it was"
            one.tokens = torch.cat([one.tokens, ids[None]], dim=1)
        return one

    def _logits(self, model: Any, one: OneRequest, written: Collection[Place] = ()) -> Tensor:
        """[V] of the last token; the model sees the tokens that it has not seen.

        Some models keep state in their modules: the request's is there for the step, and then the model's own again.
        """
        tokens, length = one.tokens, one.tokens.shape[1]
        one.begun = one.begun or length
        for end in range(max(one.begun, one.seen + 1), length + 1):  # more than one call if it begins again
            one.tokens = tokens[:, :end]
            with own_attributes(model, one.state, written) as left:
                logits = stepped(model, one)
            one.state = left
        return logits


def stepped(model: Any, one: OneRequest) -> Tensor:
    """[V] of the request's last token; ``model`` sees the tokens that it has not seen."""
    outputs = own_call(model)(**step_arguments(model, one), return_dict=True)
    one.kwargs = model._update_model_kwargs_for_generation(outputs, one.kwargs, is_encoder_decoder=False)
    one.seen = one.tokens.shape[1]
    return outputs.logits[0, -1]


def step_arguments(model: Any, one: OneRequest) -> dict[str, Any]:
    """What `generate` hands to ``model`` in the request's next step."""
    first = not one.seen
    if first:
        one.kwargs = prepared(model, one.tokens, one.use_cache)
    new = None if first or not one.kwargs.get("use_cache") else one.tokens.shape[1] - one.seen
    found: dict[str, Any] = model.prepare_inputs_for_generation(
        one.tokens, next_sequence_length=new, is_first_iteration=first, **one.kwargs
    )
    return found


def prepared(model: Any, ids: Tensor, use_cache: bool | None = None) -> dict[str, Any]:
    """What `generate` hands to the first step of ``model`` for ``ids`` ``[1, S]``: cache, positions and all else."""
    found: dict[str, Any] = {}

    def keep(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        found.update(kwargs)
        return input_ids

    # Without a mask, tokens that are equal to the padding token would be hidden.
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    mask = {"attention_mask": torch.ones_like(ids)} if takes_mask else {}
    options = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "num_return_sequences": 1}
    options |= {} if use_cache is None else {"use_cache": use_cache}
    generate = generate_of_transformers(type(model))  # the object's own may have been put there by `wrap`
    try:
        generate(model, ids, **mask, custom_generate=keep, **options)
    except ValueError:  # it prepares its inputs by a function that takes no mask
        if not mask:
            raise
        generate(model, ids, custom_generate=keep, **options)
    return found


def kept_in_object(model: nn.Module, path: str, name: str) -> Refusal:
    kind = type(vars(model.get_submodule(path))[name]).__name__
    return Refusal(
        node=name,
        operator="state in an object",
        reason=f"a run changes what is in this attribute, of class {kind}, which cannot be kept for each request",
        source_line="source line unknown",
        module=path,
    )


def tables_of(model: Any) -> dict[str, list[int]]:
    """The shapes of the tables that ids are looked up in and that give logits, of a model that says which they are."""
    found = {}
    for name in ("get_input_embeddings", "get_output_embeddings"):
        with suppress(AttributeError, NotImplementedError):
            found[name.removeprefix("get_")] = list(getattr(model, name)().weight.shape)
    return found


def why_not_run(model: Any) -> str:
    """Why the model cannot run on `generate`'s machinery, as this does; empty if it can."""
    if not isinstance(model, GenerationMixin):
        return f"{type(model).__name__} must be a GenerationMixin to run whole"
    try:
        prepared(model, torch.zeros(1, 1, dtype=torch.int64, device=device_of(model)))
    except (AttributeError, ValueError) as error:  # of a configuration that transformers knows nothing of
        return f"`generate` must be able to begin with {type(model).__name__}, got {type(error).__name__}: {error}"
    return ""
