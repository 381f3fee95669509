"""A model's capture and its rewrite: tried in the ways in which a model can be captured, the best one first."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn

from selective_compile.autocast import without_autocast
from selective_compile.block_loops import beyond_one_block, is_of_one_block
from selective_compile.capture import capture
from selective_compile.captured import Captured
from selective_compile.dropped_cache import long_form_of, lost_beyond
from selective_compile.first_call import set_for_good
from selective_compile.isolated_op import running_whole
from selective_compile.kept_captures import capture_once
from selective_compile.kept_traces import KeptTraces
from selective_compile.model_call import ATTENTION_MASK
from selective_compile.model_facts import declared_positions, device_of
from selective_compile.model_recurrences import recurrences_of
from selective_compile.passes import RefusedError, Rewrite, rewrite
from selective_compile.passes.isolated_call import WholeModules
from selective_compile.passes.recurrence_match import Recognised
from selective_compile.settling import settled
from selective_compile.whole_functions import Place


def proved(
    model: nn.Module, max_window: int | None = None, *, latents: bool = True, keep: bool = False
) -> tuple[Captured, Rewrite]:
    """Capture and rewrite; where that fails, once more with the model's recurrences left whole, if it has any.

    `max_window`, `latents`: as in `rewrite`.  `keep`: the capture may be one that is kept on disk, and is kept there.

    Raises:
        RefusedError: the model cannot be captured.
    """
    try:
        first = captured_and_rewritten(model, {}, max_window, latents=latents, keep=keep)
        if first[1].flat is not None:
            return first
        failure = None
    except RefusedError as error:
        failure = error
    functions = recurrences_of(model)
    if functions:
        return captured_and_rewritten(model, functions, max_window, latents=latents)
    if failure is not None:
        raise failure
    return first


def captured_and_rewritten(
    model: nn.Module,
    functions: Mapping[Place, Recognised],
    max_window: int | None = None,
    modules: WholeModules | None = None,
    *,
    latents: bool = True,
    keep: bool = False,
    ask: bool = True,
) -> tuple[Captured, Rewrite]:
    """``functions`` and ``modules`` are left whole; ``keep``, as in `proved`, is where none are, and for traces too.

    A model that makes itself a table when first called is given that first.  Long requests are computed, too, if it is
    known how `generate` goes on where a request becomes one.  What its code asks of the number of tokens is answered,
    if ``ask`` is given, where no request of a length that the model declares is refused for that.
    """
    names = {str(place): known for place, known in functions.items()}

    def rewritten_of(given: Captured, *, long_form: bool = modules is None, blocks: bool = True) -> Rewrite:
        with without_autocast(device_of(model)):  # values are computed, as those of constants and masks
            return rewrite(
                given.module,
                given.examples,
                paged=True,
                ones=ATTENTION_MASK,
                functions=names,
                max_window=max_window,
                modules=modules,
                latents=latents,
                traces=KeptTraces() if keep else None,
                long_form=long_form,
                blocks=blocks,
                stores=given.sets,
            )

    captured = captured_as_it_is(model, functions, keep=keep, ask=ask)
    rewritten = rewritten_of(captured)
    if rewritten.traced.makes_constants and set_for_good(model, Tensor, instead_of=captured.answered_by):
        captured = captured_as_it_is(model, functions, keep=keep, ask=ask)
        rewritten = rewritten_of(captured)
    if not knows_long_form(model, rewritten):
        rewritten = rewritten_of(captured, long_form=False)
    if is_of_one_block(captured, rewritten):
        with running_whole(None if modules is None else modules.run):  # else neither the graph nor the model goes on
            beyond = beyond_one_block(model, captured, rewritten, names)
        if beyond is None:
            rewritten = rewritten_of(captured, long_form=False, blocks=False)
        else:
            captured = beyond
    if captured.asked and not reaches_far(model, captured, rewritten):
        return captured_and_rewritten(model, functions, max_window, modules, latents=latents, ask=False)
    bound_where_lost(model, rewritten)
    rewritten.traced.left_out = captured.left_out
    if modules is not None:
        once = dict.fromkeys(call.module for call in rewritten.traced.isolated if call.token_wise)
        rewritten.traced.left_out += tuple(name for path in once for name in modules.stored(path))
    return captured, rewritten


def bound_where_lost(model: nn.Module, rewritten: Rewrite) -> None:
    """No request comes to be longer than `generate` keeps what it has of it."""
    lost = lost_beyond(model) if rewritten.flat is not None and rewritten.long_form is None else None
    if lost is not None:
        rewritten.traced.bound(lost)


def reaches_far(model: nn.Module, captured: Captured, rewritten: Rewrite) -> bool:
    """Whether it was rewritten, for requests of all lengths that the model declares."""
    bounds = [bound for bound in (captured.max_tokens, rewritten.traced.max_tokens) if bound is not None]
    declared = declared_positions(model)
    return rewritten.flat is not None and (not bounds or (declared is not None and declared <= min(bounds)))


def knows_long_form(model: nn.Module, rewritten: Rewrite) -> bool:
    """Whether it is known how requests become long, also where none do; it is noted in ``rewritten``."""
    beyond, flat = rewritten.traced.long_beyond, rewritten.flat
    if beyond is not None and flat is not None and not flat.prefix:
        rewritten.long_form = long_form_of(model, beyond)
    return beyond is None or rewritten.long_form is not None


def captured_as_it_is(model: nn.Module, functions: Mapping[Place, Recognised], *, keep: bool, ask: bool) -> Captured:
    return capture_once(model) if keep else settled(model, partial(capture, model, functions, ask=ask))
