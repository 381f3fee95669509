"""A model's own graph over ``[1, S]`` tokens, by Dynamo, without running the model."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import ConstDictVariable, SymNodeVariable
from torch._dynamo.variables.nn_module import NNModuleVariable, UnspecializedNNModuleVariable
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import _disable_current_modes

from selective_compile.autocast import autocast_of
from selective_compile.captured import Captured
from selective_compile.flex_blocks import blocks_unread
from selective_compile.graph_writes import GraphWrites
from selective_compile.joined_graphs import ApartError, JoinedGraphs, Side
from selective_compile.known_conditions import known_conditions
from selective_compile.live_conditions import STEP
from selective_compile.live_settings import Read, names_read
from selective_compile.model_call import CANNOT, logits_call
from selective_compile.model_facts import check, declared_positions, device_of
from selective_compile.module_state import same_buffers
from selective_compile.passes.autocast_casts import write_casts
from selective_compile.passes.flex_calls import write_out_flex
from selective_compile.passes.lengths import ALL_LENGTHS, CAPTURE_TOKENS, SHORTEST, bounds_requests, ends_of
from selective_compile.passes.normalise import keep_sources
from selective_compile.passes.recurrence_match import Recognised
from selective_compile.passes.refusals import Refusal, RefusedError
from selective_compile.tensor_branches import Branches, nodes_behind
from selective_compile.trace_conditions import conditions_of
from selective_compile.unheard import unheard
from selective_compile.where_refused import GuardsByModule, module_of_frames
from selective_compile.whole_functions import Place, left_whole

logger = logging.getLogger(__name__)

UNTRACEABLE = "graph capture"  # stands as the operator of what Dynamo cannot trace

# What it warns of for each call of such a function, as of those that look for installed packages: that it reads a
# cached function's code, and so what that reads as it is now.
CACHED_FUNCTION = "Dynamo detected a call to a `functools.lru_cache`-wrapped function"

# Where torch 2.11 writes, for each trace, that it cannot sort the functions that `by_dynamo` has left out.
METRICS = logging.getLogger("torch._dynamo.metrics_context")

# What Dynamo raises of a call; the second goes through it as it is, and is of a size that only values tell.
CANNOT_TRACE = (TorchDynamoException, GuardOnDataDependentSymNode)


class CaptureDone(BaseException):
    """Leaves the compiled frame before it would run; it never leaves `capture`."""


def capture(model: nn.Module, functions: Mapping[Place, Recognised] | None = None, *, ask: bool = True) -> Captured:
    """Trace ``model`` called with ids ``[1, S]``, S symbolic, and no cache.

    ``functions`` are left whole: known recurrences (`whole_functions.known_recurrences`).  Where its code asks a tensor
    whether a request is longer than some number, and ``ask`` is given, both of what it may do are traced, and the graph
    chooses; or requests are bounded, where that is no less than the model declares.

    Raises:
        ValueError: the model is no torch module, or in training mode; or Dynamo is off.
        RefusedError: the model branches on the number of tokens, or Dynamo cannot trace it to one graph.
    """
    check(model)
    branches = Branches(SHORTEST, [*model.buffers()])
    captured = traced(model, functions, branches if ask else None)
    if not branches.asked:
        return captured
    try:
        return of_each_length(model, functions, captured, branches)
    except (RefusedError, ApartError, *CANNOT) as failure:
        logger.info("what is asked of the number of tokens cannot be answered: %s", failure)
        return traced(model, functions, None)


def of_each_length(
    model: nn.Module, functions: Mapping[Place, Recognised] | None, captured: Captured, branches: Branches
) -> Captured:
    """Raises `RefusedError`, `ApartError`, or whatever an operator raises without numbers: nothing is known."""
    short = side_of(captured, model, branches)
    if branches.turning is None:
        return captured
    captured = replace(captured, asked=True)
    (condition, answer), beyond = branches.turning, Branches(branches.longest + 1, branches.buffers)
    try:
        other = traced(model, functions, beyond)
        long = side_of(other, model, beyond)
        found = captured.joined(other, JoinedGraphs(short, long, condition, holds=answer.holds))
    except (RefusedError, ApartError):
        if answer.longest < (declared_positions(model) or ALL_LENGTHS):
            raise
        return captured.bounded(answer.longest)
    return found if beyond.longest == ALL_LENGTHS else found.bounded(beyond.longest)


def side_of(captured: Captured, model: nn.Module, branches: Branches) -> Side:
    """Raises `ApartError` where what was asked is written to."""
    _, arguments = logits_call(model, torch.zeros(1, CAPTURE_TOKENS, dtype=torch.int64, device=device_of(model)))
    side = Side(module=captured.module, writes=GraphWrites(captured.module, captured.inputs(arguments)))
    asked = {name for name, _ in branches.asked}
    for node in captured.module.graph.nodes:
        behind = nodes_behind(node) if node.name in asked else ()
        behind = [*behind, node] if node.name in branches.behind else behind
        if any(side.writes.is_written(each, but=behind) for each in behind):
            raise ApartError(f"{node.name} is of something that is written to")
    return side


def traced(model: nn.Module, functions: Mapping[Place, Recognised] | None, branches: Branches | None) -> Captured:
    """``branches``: what answers where its code asks a tensor; None ends the trace there."""
    found: list[Captured] = []
    left = [place.bound().__code__ for place in functions or {}]
    # Dynamo's record of the backend outlives the call: it must not hold the model.
    paths = {id(module): path for path, module in model.named_modules()}

    def keep(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        keep_sources(module)
        write_casts(module, () if autocast is None else (autocast,))
        write_out_flex(module)
        found.append(
            Captured(
                module=module,
                examples=list(examples),
                ends=ends_of_graph(),
                **stores_of_trace(paths),
                read=read_by_trace().beside(left),
                conditions=conditions_of(guards_of_trace()),
            )
        )
        return leave

    autocast = autocast_of(device_of(model))
    ids = torch.zeros(1, CAPTURE_TOKENS, dtype=torch.int64, device=device_of(model))
    call, arguments = logits_call(model, ids)
    for argument in arguments:
        torch._dynamo.mark_dynamic(argument, 1)
    answered = nullcontext() if branches is None else branches.answered()
    # What is assigned to `data` of a buffer, Dynamo assigns as it traces: memory that there is none of.
    with (
        by_dynamo(),
        blocks_unread(),
        torch.no_grad(),
        left_whole(functions or {}),
        same_buffers(model),
        plain_buffers(model),
        answered,
    ):
        try:
            torch.compile(call, backend=keep, fullgraph=True)(*arguments)
        except CaptureDone:
            pass
        except BackendCompilerFailed as failure:
            raise failure.inner_exception from None
        except CANNOT_TRACE as failure:
            raise RefusedError([untraceable(model, failure)]) from failure
    if not found:
        raise ValueError("Dynamo must be on to trace the model, got TORCHDYNAMO_DISABLE=1")
    captured = found.pop()  # the list outlives this call in Dynamo's record of the backend
    return captured if branches is None else replace(captured, answered_by=tuple(branches.read))


@contextmanager
def by_dynamo() -> Iterator[None]:
    """Dynamo traces as it would by default: with what a user has set for other code, or under a mode of his that sees
    each operator, it would leave the call as it is.  What it has traced before, of a model with other sizes, is none of
    its business.  It does not warn of what transformers' own code calls, and what code tells people is left out."""
    config: dict[str, Any] = {
        "specialize_float": True,
        "assume_static_by_default": True,
        "automatic_dynamic_shapes": False,
        "disable": False,
        "ignore_logging_functions": torch._dynamo.config.ignore_logging_functions | telling_functions(),
    }
    stance, modes = torch.compiler.set_stance("default"), _disable_current_modes()
    with torch._dynamo.config.patch(config), stance, modes, known_conditions(), unheard(METRICS):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", CACHED_FUNCTION)
            yield


def telling_functions() -> set[Any]:
    """What only tells people something: loggers' methods, with those that transformers adds, which older models call in
    each forward (`PreTrainedConfig.use_return_dict`), and Python's own."""
    names = ("debug", "info", "warning", "warn", "error", "exception", "critical", "log", "warning_once", "info_once")
    of_loggers = (getattr(logging.Logger, name, None) for name in names)
    return {print, warnings.warn, *(function for function in of_loggers if function is not None)}


@contextmanager
def plain_buffers(model: nn.Module) -> Iterator[None]:
    """Dynamo cannot follow a forward that assigns an `nn.Buffer` to its own name: meanwhile they are plain tensors.

    Tensors that were registered by name are plain already, and are assigned alike.
    """
    marked: list[Any] = [buffer for buffer in model.buffers() if vars(buffer).get("_is_buffer")]
    for buffer in marked:
        del buffer._is_buffer
    try:
        yield
    finally:
        for buffer in marked:
            buffer._is_buffer = True


def untraceable(model: nn.Module, failure: Exception) -> Refusal:
    lines = [line.strip() for line in str(failure).strip().splitlines() if line.strip()]
    stack = getattr(failure, "real_stack", None)
    where = f"{stack[-1].filename}:{stack[-1].lineno}  {stack[-1].line}" if stack else "source line unknown"
    return Refusal(
        node="model",
        operator=UNTRACEABLE,
        reason=f"Dynamo cannot trace the model to one graph: {lines[0] if lines else type(failure).__name__}",
        source_line=where,
        module=module_of_frames(model, stack or ()),
    )


def ends_of_graph() -> tuple[int, ...]:
    """Inside the backend: the longest requests that conditions of Dynamo's graph hold for, but those that always hold.

    Raises:
        RefusedError: the model took a branch that holds for other lengths than all up to some length, so the one graph
            would be wrong for some of the lengths that a request goes through as it grows.
    """
    context = TracingContext.try_get()
    assert context is not None and context.fake_mode is not None and context.fake_mode.shape_env is not None
    guards = context.fake_mode.shape_env.guards
    modules = guards.modules if isinstance(guards, GuardsByModule) else [""] * len(guards)
    refusals = [
        Refusal(
            node="tokens",
            operator="branch on the number of tokens",
            reason=f"the model takes this branch only where {guard.expr}",
            source_line=str(guard.sloc.maybe_user_loc or guard.sloc),
            module=module,
        )
        for guard, module in zip(guards, modules, strict=True)
        if not bounds_requests(guard.expr)
    ]
    if refusals:
        raise RefusedError(refusals)
    return ends_of(guard.expr for guard in guards)


def stores_of_trace(paths: Mapping[int, str]) -> dict[str, Any]:
    """What the trace would have a call set: attributes of modules, whose ``paths`` these are, and what is set."""
    tx: Any = InstructionTranslator.current_tx()
    sets, stored = [], set()
    found = list(registered(tx.output.side_effects))
    for variable, written in tx.output.side_effects.store_attr_mutations.items():
        if isinstance(variable, (NNModuleVariable, UnspecializedNNModuleVariable)):
            found.append((paths.get(id(getattr(variable, "value", None)), ""), written))
    for path, written in found:
        sets += [f"{path}.{name}" if path else name for name in written]
        stored |= {value.as_proxy().node.name for value in written.values() if value.is_tensor()}
        stored |= {str(value.sym_num) for value in written.values() if isinstance(value, SymNodeVariable)}
    return {"sets": tuple(sets), "stored": frozenset(stored)}


def registered(effects: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """By module, the buffers that the trace would have a call register, which Dynamo has as keys of a dictionary."""
    for variable in effects.id_to_variable.values():
        source = getattr(variable, "source", None)
        if not isinstance(variable, ConstDictVariable) or source is None or not effects.is_modified(variable):
            continue
        path = STEP.sub(r".\1", source.name).removeprefix("L['model']").lstrip(".")
        if path.rpartition(".")[2] == "_buffers":
            values = {key.vt.as_python_constant(): value for key, value in variable.items.items()}
            made = {name: value for name, value in values.items() if value.source is None and value.is_tensor()}
            yield path.removesuffix("_buffers").rstrip("."), made


def guards_of_trace() -> Iterator[Any]:
    context = TracingContext.try_get()
    assert context is not None
    return iter(context.guards_context.dynamo_guards)


def read_by_trace() -> Read:
    context = TracingContext.try_get()
    assert context is not None
    names, keys = names_read(guards_of_trace())
    return Read(names=names, keys=keys, code=frozenset(context.traced_code))


def leave(*_: Any) -> Any:
    raise CaptureDone
