"""The `torch.compile` backend, and what the engine and `explain` need of it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import InstructionTranslator, TensorifyState
from torch._guards import CompileContext

from selective_compile.compiled_step import runs_native
from selective_compile.compiling import compiled_as_it_came
from selective_compile.isolation import prove
from selective_compile.kept_traces import KeptTraces
from selective_compile.kernels import ragged_attention_cpu
from selective_compile.model_call import CANNOT
from selective_compile.model_facts import uncompiled, undeclared_end, why_no_head
from selective_compile.module_state import lock_of
from selective_compile.options import BackendOptions, attention_window
from selective_compile.padded_program import PaddedProgram
from selective_compile.passes import Refusal, RefusedError, Rewrite, rewrite_padded
from selective_compile.passes.autocast_casts import write_casts
from selective_compile.passes.normalise import is_float_input, place_of, source_name
from selective_compile.programs import Program, compile_step_program, why_not_whole
from selective_compile.report import Report, refused_report, report_on
from selective_compile.sequential_program import SequentialProgram
from selective_compile.step_program import CallSite, StateSite, StepProgram

__all__ = [
    "CallSite",
    "Program",
    "StateSite",
    "SelectiveBackend",
    "StepProgram",
    "compile_step_program",
    "explain",
    "selective",
]

logger = logging.getLogger(__name__)
KEPT_REPORTS = 64


class SelectiveBackend:
    """What ``torch.compile(model, backend="selective")`` calls; ``reports`` holds what became of each graph."""

    __name__ = "selective"

    def __init__(self) -> None:
        self.reports: deque[Report] = deque(maxlen=KEPT_REPORTS)

    def __call__(
        self,
        module: fx.GraphModule,
        examples: list[Any],
        *,
        options: dict[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        """Rewrite one of Dynamo's graphs for a padded call, or pass it to Inductor as it came and say why.

        Raises:
            ValueError: an unknown option or value; `mode` is not one of Inductor's that this backend can honour.
        """
        if mode not in (None, "default"):
            raise ValueError(f"mode must be 'default' with backend 'selective', got {mode!r}")
        if options is not None and not isinstance(options, Mapping):
            raise ValueError(f"options must be a dictionary or None, got {options!r}")
        chosen = BackendOptions(**(options or {}))
        warn_of_last_graph()
        reason = why_not(module, examples)
        if reason is None:
            ask_for_constant_floats(module)
            ask_for_symbolic_sizes(module)
            program = self._rewritten(module, examples, chosen)
            if program is not None:
                return program
        else:
            self._note(refused_report("graph", reason))
        return compiled_as_it_came(module, examples, inductor=chosen.inductor)

    def _rewritten(self, module: fx.GraphModule, examples: list[Any], options: BackendOptions) -> Any:
        tensors = (example for example in examples if isinstance(example, torch.Tensor))
        if any(runs_native(options.implementation, tensor.device) for tensor in tensors):
            ragged_attention_cpu.build_beside()
        try:
            traces = KeptTraces() if options.keep_traces else None
            write_casts(module)
            rewritten = rewrite_padded(module, examples, traces)
        except RefusedError as error:
            self._note(refused_report("graph", "runs through Inductor as it came", error.refusals))
            return None
        self._note(report_on(rewritten, "graph", note_on(rewritten)))
        if rewritten.flat is None:
            return None
        return PaddedProgram(rewritten, module, options)

    def _note(self, report: Report) -> None:
        self.reports.append(report)
        logger.log(logging.INFO if report.ok else logging.WARNING, "%s", report)


def note_on(rewritten: Rewrite) -> str:
    if rewritten.flat is None:
        return "runs through Inductor as it came"
    if rewritten.summary is None:
        return "padding removed"
    return f"padding removed, but for {rewritten.summary.num_operations} operations at the end, which are of whole rows"


def warn_of_last_graph() -> None:
    """Past its limit of graphs for one code object, Dynamo runs every call that fits none of them eagerly."""
    compile_id = CompileContext.current_compile_id()
    limit = torch._dynamo.config.recompile_limit
    if compile_id is not None and compile_id.frame_compile_id is not None and compile_id.frame_compile_id + 1 == limit:
        logger.warning(
            "this is the last of the %d graphs that Dynamo makes of this code: a call that fits none of them will run "
            "the model eagerly, without selective batching; raise torch._dynamo.config.recompile_limit, or call "
            "torch._dynamo.reset() between models",
            limit,
        )


def why_not(module: fx.GraphModule, examples: list[Any]) -> str | None:
    """Why a graph must run as it came: gradients are recorded, or autocast would change what operators compute in; or
    Dynamo broke off behind it, so that code that it has not seen reads rows of padding, which would be zeros."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "runs through Inductor as it came: autocast is on (convert the model's weights to rewrite it)"
    switched = any(node.target is torch._C._set_grad_enabled and node.args == (True,) for node in module.graph.nodes)
    recorded = torch.is_grad_enabled() or switched
    if recorded and any(isinstance(e, torch.Tensor) and e.requires_grad for e in examples):
        return "runs through Inductor as it came: gradients are recorded (call it under torch.no_grad() to rewrite it)"
    ended: Any = getattr(module, "compile_subgraph_reason", None)
    if ended is not None and ended.graph_break:
        broken = str(ended.reason).strip().splitlines()[0]
        what = f"Dynamo breaks the graph behind it, and what follows may read padding ({broken})"
        return f"runs through Inductor as it came: {what}"
    return None


def ask_for_constant_floats(module: fx.GraphModule) -> None:
    """Have Dynamo trace once more with the float attributes of modules (an epsilon, say) as constants.

    With ``dynamic=True`` it makes them inputs.  Arguments of the call stay inputs: a graph for each would be too many.
    """
    floats = [node for node in module.graph.nodes if node.op == "placeholder" and is_float_input(node)]
    names = [node.meta["example_value"].item_memo.node._expr.name for node in floats if "." in source_name(node)]
    new = [name for name in names if not TensorifyState.should_specialize(name)]
    for name in new:
        TensorifyState.specialize(name)
    if new:
        raise TensorifyScalarRestartAnalysis(restart_reason="selective: float attributes must be constants")


def ask_for_symbolic_sizes(module: fx.GraphModule) -> None:
    """Have Dynamo trace once more with batch and tokens symbolic, unless it did or a cache is in the graph.

    By default Dynamo takes the sizes of a first call as constants.  A constant says nothing about which dimension is
    the tokens', so nothing could be proved.
    """
    asked = False
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    if any(place_of(node) == "other" for node in placeholders):
        return
    for node in placeholders:
        if place_of(node) != "tokens":
            continue
        example = node.meta["grapharg"].example
        wanted = [d for d in (0, 1) if isinstance(node.meta["example_value"].shape[d], int) and example.shape[d] > 1]
        missing = [d for d in wanted if d not in getattr(example, "_dynamo_weak_dynamic_indices", ())]
        for dimension in missing:
            torch._dynamo.maybe_mark_dynamic(example, dimension)
            asked = True
    if asked:
        # Symbolic sizes are operations of the graph, so that tracing again takes other steps up to a break in it.
        InstructionTranslator.current_tx().speculation_log.clear()
        raise TensorifyScalarRestartAnalysis(restart_reason="selective: batch and tokens must be symbolic")


selective = SelectiveBackend()


def explain(model: nn.Module, *, max_attention_window: int | None = None) -> Report:
    """What the engine would make of ``model``: every attention call with what was proved, every refusal.

    Args:
        max_attention_window: that of `EngineConfig`, whose windows the report names as such.

    Raises:
        ValueError: the window is none; or the model is in training mode, or has something that cannot be narrowed.
    """
    window = attention_window(max_attention_window)
    model = uncompiled(model)
    name = type(model).__name__
    if reason := why_no_head(model):
        return refused_report(name, f"the engine refuses it: {reason}")
    try:
        with lock_of(model), compile_lock:
            proved = prove(model, "sequential", window)
    except RefusedError as error:
        return unproved_report(model, error.refusals)
    longest = undeclared_end(model, proved.max_positions(model))
    return report_on(proved.rewritten, name, isolated=proved.isolated, longest=longest)


def report_of(program: Program, model: nn.Module) -> Report:
    """What `explain` says of a model that is compiled for the engine."""
    if isinstance(program, StepProgram):
        longest = undeclared_end(model, program.max_positions)
        return report_on(program.rewritten, type(model).__name__, isolated=program.isolated, longest=longest)
    return sequential_report(model, program.refusals)


def unproved_report(model: nn.Module, refusals: Sequence[Refusal]) -> Report:
    """Of a model that can only run whole, or not even so."""
    if reason := why_not_whole(model):
        return refused_report(type(model).__name__, f"the engine refuses it: {reason}", tuple(refusals))
    try:
        return sequential_report(model, SequentialProgram(model, refusals).refusals)
    except RefusedError as error:
        return refused_report(type(model).__name__, "the engine refuses it", error.refusals)
    except CANNOT:
        return refused_report(type(model).__name__, "nor can generate run it", tuple(refusals))


def sequential_report(model: nn.Module, refusals: Sequence[Refusal]) -> Report:
    note = "the engine runs the whole model for one request after another"
    return refused_report(type(model).__name__, note, tuple(refusals), verdict="sequential")
