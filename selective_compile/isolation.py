"""Which modules of a model run by themselves, request after request, so that the rest of it is ragged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from selective_compile.autocast import autocast_of, own_calls_refusal
from selective_compile.cache_reach import cache_refusal
from selective_compile.capture import UNTRACEABLE, capture
from selective_compile.captured import Captured
from selective_compile.counted_calls import counting_refusal
from selective_compile.current_device import on_device_of
from selective_compile.first_call import changes_weights
from selective_compile.handed_inputs import handed_refusal
from selective_compile.isolated_cache import Caches, caches_of
from selective_compile.isolated_paths import UnprovedError, more_modules, outermost
from selective_compile.isolated_program import MODES, IsolatedProgram, Mode
from selective_compile.isolation_trial import NEEDED, by_program, departure, rows_by_program
from selective_compile.kept_trials import passed_once
from selective_compile.kept_weights import Weights
from selective_compile.live_settings import hook_refusals
from selective_compile.model_call import CANNOT, logits_call
from selective_compile.model_facts import check, declared_positions, device_of
from selective_compile.model_recurrences import recurrences_of
from selective_compile.module_program import ModuleProgram
from selective_compile.module_state import Place as StatePlace
from selective_compile.module_state import lock_of, own_attributes, same_buffers, same_objects, unchanged
from selective_compile.one_token import LONGER, Rows, Wanted, one_token_refusal
from selective_compile.options import EngineConfig, Fallback
from selective_compile.passes import Refusal, RefusedError, Rewrite
from selective_compile.passes.batch_dependence import product_types
from selective_compile.passes.position_limit import position_limit
from selective_compile.passes.recurrence_match import Recognised
from selective_compile.prefix_trial import not_as_computed, prefix_refusal
from selective_compile.rewriting import captured_and_rewritten, proved
from selective_compile.rounding import products_in
from selective_compile.skeleton import others_in, results_of_modules, skeleton, stand_in
from selective_compile.step_program import StepProgram
from selective_compile.whole_functions import Place
from selective_compile.whole_modules import ModulesOf

ATTEMPTS = 6
# A module without a cache is given all tokens of its request at each step, and by `generate` one of them: what counts
# tokens, as a limit to those of an expert, may bite in a long request alone.
LONGER_ALONE = 320


@dataclass(frozen=True, kw_only=True)
class Proved:
    """The flat graph of a model and, of each module that is isolated in it, what could not be proved there."""

    captured: Captured
    rewritten: Rewrite
    isolated: Mapping[str, Refusal]
    caches: Caches | None = None
    written: frozenset[StatePlace] = frozenset()  # buffers, by each call
    mode: Mode = "all tokens"

    @property
    def table_end(self) -> int | None:
        """How long a request may be by the tables that are read at its tokens' positions; None: there is none."""
        assert self.rewritten.flat is not None
        return least(self.captured.max_tokens, self.rewritten.traced.max_tokens, position_limit(self.rewritten.flat))

    def max_positions(self, model: nn.Module) -> int | None:
        """How long a request may be, as far as ``model``, its trace and the tables that it reads tell."""
        return least(declared_positions(model), self.table_end)

    def short_positions(self, model: nn.Module) -> int | None:
        """The same of requests that are computed in one way, whatever length they began with."""
        form = self.rewritten.long_form
        return least(self.max_positions(model), None if form is None else form.beyond)


def least(*limits: int | None) -> int | None:
    """None: there is none."""
    return min((limit for limit in limits if limit is not None), default=None)


def prove(
    model: nn.Module, fallback: Fallback, max_window: int | None = None, *, latents: bool = True, keep: bool = False
) -> Proved:
    """Capture and rewrite ``model``, isolating what still mixes unless ``fallback`` is "refuse".

    `latents`: as in `rewrite`; `keep`: as in `proved`.  `max_window`: as in `rewrite`, for a model in which nothing has
    to be isolated.  Modules that cannot be captured, but treat tokens independently, are left as they are whatever
    ``fallback`` is; under autocast there may be neither these nor isolated ones.

    Raises:
        RefusedError: what could not be proved, as it was found without isolating anything; or the model computes
            something else of one token, or once it was called, or `generate` hands it something else than its tokens.
        ValueError: as `capture`.
    """
    try:
        if isinstance(model, nn.Module) and (hooks := hook_refusals(model)):
            raise RefusedError(hooks)  # not to be isolated: trials of a part would call them too
        check(model)
        under_autocast = autocast_of(device_of(model)) is not None
        with lock_of(model), on_device_of(model), same_buffers(model), same_objects(model):  # for trials
            found = ragged(model, "refuse" if under_autocast else fallback, max_window, latents=latents, keep=keep)
            departure = tried(model, found, max_window, keep=keep)
        if under_autocast and (calls := found.rewritten.traced.isolated):
            raise RefusedError([own_calls_refusal(call.module for call in calls)])
        if departure is not None:  # not for isolated modules: `generate` has it in every step, and they see more tokens
            raise RefusedError([departure])
        return found
    except RefusedError as error:
        if max_window is None:
            raise
        raise ValueError(
            f"max_attention_window must be None for a model in which not every attention is ragged, got "
            f"{max_window}: {error}"
        ) from error


def tried(model: nn.Module, found: Proved, max_window: int | None, *, keep: bool) -> Refusal | None:
    """As `departs_in_use`, which an earlier process may have found to be None, if ``keep``."""
    trials = partial(departs_in_use, model, found, max_window)
    kept = keep and not found.rewritten.traced.isolated
    asked = max_window, prefix_of(found), found.short_positions(model)
    return passed_once(model, found.captured, trials, *asked) if kept else trials()


def departs_in_use(model: nn.Module, found: Proved, max_window: int | None) -> Refusal | None:
    """What to say of a model that `generate` does not use as its graph is computed, as far as trials tell."""
    if departure := goes_by_calls(model, found):
        return departure
    if not max_window and (departure := cache_refusal(model, found.rewritten.traced.calls)):
        return departure
    with products_in(product_types_of(found)):
        departure = one_token_refusal(
            model,
            found.isolated,
            prefix=prefix_of(found),
            longest=found.short_positions(model),
            rows=rows_wanted(model, found),
            wanted=steps_wanted(model, found),
            longer=LONGER_ALONE if found.mode == MODES[-1] and found.isolated else LONGER,
        )
        return departure or handed_refusal(model) or goes_on_otherwise(model, found)


def goes_by_calls(model: nn.Module, found: Proved) -> Refusal | None:
    """What to say of a model whose calls depend on how many there were before."""
    whole = dict.fromkeys(call.module for call in found.rewritten.traced.isolated)
    again = None if whole else lambda: capture(model, recurrences_of(model))
    return counting_refusal(model, found.captured, again, whole)


def product_types_of(found: Proved) -> frozenset[torch.dtype]:
    flat = found.rewritten.flat
    return frozenset() if flat is None else product_types(flat)


def prefix_of(found: Proved) -> int:
    flat = found.rewritten.flat
    return 0 if flat is None else flat.prefix


def rows_wanted(model: nn.Module, found: Proved) -> Rows | None:
    """What the program gives of all tokens, of a model that gives the logits of the last one alone."""
    (tail,) = found.rewritten.tails
    return partial(rows_by_program, program_of(model, found)) if tail.slices else None


def steps_wanted(model: nn.Module, found: Proved) -> Wanted | None:
    """What the program gives of generated tokens, of a model that computes those otherwise than a prompt's."""
    flat = found.rewritten.flat
    if flat is None or not any(call.unlimited_steps for call in flat.recurrences):
        return None
    program = program_of(model, found)
    return lambda ids, prompt: by_program(program, ids, [prompt] + [1] * (len(ids) - prompt))


def program_of(
    model: nn.Module, found: Proved, config: EngineConfig | None = None, *, longest: int | None = None
) -> StepProgram:
    """Of requests of at most ``longest`` tokens, None: of any.  Without a ``config``: for a trial, not compiled."""
    kind: Callable[..., StepProgram] = ModuleProgram if found.rewritten.traced.isolated else StepProgram
    if found.isolated:
        kept: dict[str, Any] = {name: getattr(found, name) for name in ("isolated", "caches", "written", "mode")}
        kind = partial(IsolatedProgram, **kept)
    captured = None if config is None else found.captured
    config = config or EngineConfig(compile=False)
    return kind(model, found.rewritten, config, max_positions=longest, captured=captured)


def goes_on_otherwise(model: nn.Module, found: Proved) -> Refusal | None:
    """What to say of a model that has a prefix, if that is not known to be computed as `generate` would."""
    if not prefix_of(found):
        return None
    if isolated := found.rewritten.traced.isolated:
        return not_as_computed(model, f"no module may run by itself in a model with a prefix: {isolated[0].module}")
    return prefix_refusal(model, program_of(model, found))


def as_a_whole(model: nn.Module, max_window: int | None, *, latents: bool, keep: bool) -> Proved:
    captured, rewritten = proved(model, max_window, latents=latents, keep=keep)
    if rewritten.flat is None:
        raise UnprovedError(rewritten)
    return Proved(captured=captured, rewritten=rewritten, isolated={})


def as_calls_leave_it(model: nn.Module, max_window: int | None, *, latents: bool, keep: bool) -> Proved:
    """As `as_a_whole`, once more where a call changes weights, which the next one may leave as they are."""
    weights = Weights(list(model.modules()))
    try:
        return as_a_whole(model, max_window, latents=latents, keep=keep)
    except RefusedError:
        # A call of that, or one more.
        if not (weights.are_others() or changes_weights(model)):
            raise
        return as_a_whole(model, max_window, latents=latents, keep=keep)


def ragged(model: nn.Module, fallback: Fallback, max_window: int | None, *, latents: bool, keep: bool) -> Proved:
    """As `prove`, for two tokens and more.  Nothing is isolated where ``max_window`` is given."""
    try:
        return as_calls_leave_it(model, max_window, latents=latents, keep=keep)
    except RefusedError as error:
        kept = fallback == "refuse" and not any(refusal.operator == UNTRACEABLE for refusal in error.refusals)
        if kept or max_window is not None:
            raise
        found = isolated(model, error, refuse=fallback == "refuse", latents=latents)
        if found is None:
            raise
        return found


@torch.no_grad()
def buffers_written(model: nn.Module) -> frozenset[StatePlace]:
    """By a call that is not the first: some models change themselves in that, such as rescale their weights, which
    copies would not tell."""
    call, arguments = logits_call(model, torch.zeros(1, 2, dtype=torch.int64, device=device_of(model)))
    with own_attributes(model, {}):
        call(*arguments)
    with unchanged(model) as written:
        call(*arguments)
    return frozenset(written)


def mode_found(model: nn.Module, found: Proved) -> Mode | None:
    """The least work for isolated modules with which a trial gives the model's own logits; None if none does.

    With which it gives them in all rows, if there is such work: only else may rounding decide some of them.
    """
    for call in found.rewritten.traced.isolated:
        if call.token_wise:
            continue
        cached = None if found.caches is None else found.caches.calls.get(call.module)
        if others_in(call.structure) and not (cached is not None and cached.takes(call.structure)):
            return None  # it is given an object of which nothing is known
    longest = found.max_positions(model)
    if longest is not None and longest < NEEDED:
        longest = found.table_end  # what a model declares it may go beyond, if no table ends there
    if not found.isolated:
        return None if departure(model, program_of(model, found, longest=longest)) == "all" else found.mode
    in_most: Mode | None = None
    for mode in MODES if found.caches is not None else MODES[-1:]:
        departs = departure(model, program_of(model, replace(found, mode=mode), longest=longest))
        if departs == "none":
            return mode
        if departs == "some" and in_most is None:
            in_most = mode
    return in_most


def attempt(
    model: nn.Module,
    traced: nn.Module,
    functions: Mapping[Place, Recognised],
    chosen: Mapping[str, Refusal],
    *,
    latents: bool,
) -> Proved:
    """``traced`` is ``model`` with stand-ins for the ``chosen`` modules."""
    captured, rewritten = captured_and_rewritten(traced, functions, modules=ModulesOf(model), latents=latents)
    if rewritten.flat is None:
        raise UnprovedError(rewritten)
    return Proved(captured=captured, rewritten=rewritten, isolated=without_token_wise(chosen, rewritten))


def without_token_wise(chosen: Mapping[str, Refusal], rewritten: Rewrite) -> dict[str, Refusal]:
    """The modules that have to run for one request after another."""
    calls = rewritten.traced.isolated
    once = {call.module for call in calls} - {call.module for call in calls if not call.token_wise}
    return {path: refusal for path, refusal in chosen.items() if path not in once}


def isolated(model: nn.Module, error: RefusedError, *, refuse: bool = False, latents: bool = True) -> Proved | None:
    """With more and more modules isolated, until nothing is refused; None if that cannot be reached.

    ``refuse``: None also where modules would have to run for one request after another.
    """
    try:
        written = buffers_written(model)
        results = results_of_modules(model)
        functions = recurrences_of(model)
    except CANNOT:  # the model itself cannot be called so, as those that know only some lengths
        return None
    chosen: dict[str, Refusal] = {}
    ahead: list[int] = []
    for _ in range(ATTEMPTS):
        ahead += [refusal.ahead for refusal in error.refusals if refusal.ahead is not None]
        more = more_modules(model, results, chosen, error)
        if not more:
            return None
        chosen = outermost({**more, **chosen})
        replaced = {path: stand_in(path, results[path]) for path in chosen}
        try:
            found = attempt(model, skeleton(model, replaced), functions, chosen, latents=latents)
        except RefusedError as another:
            if refuse and isinstance(another, UnprovedError) and another.isolates:
                return None
            error = another
            continue
        if (refuse and found.isolated) or reaches_later(model, found, [*ahead, *found.rewritten.traced.ahead]):
            return None
        caches = caches_of(model, found.isolated) if found.isolated else None
        found = replace(found, caches=caches, written=written)
        with products_in(product_types_of(found)):
            mode = mode_found(model, found)
        return None if mode is None else replace(found, mode=mode)
    return None


def reaches_later(model: nn.Module, found: Proved, ahead: Sequence[int]) -> bool:
    """Whether a request can be so long that it has a token that sees a later one: no trial is."""
    longest = found.max_positions(model)
    return any(longest is None or position + 1 < longest for position in ahead)
