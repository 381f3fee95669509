"""Graph in, graph out: a decoder's graph over ``[B, S]`` becomes one over the ragged batch ``[1, T]``."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

import selective_compile.latent_ops
import selective_compile.ops
import selective_compile.rotary_ops
import selective_compile.selection_ops
import selective_compile.state_ops  # noqa: F401  (all register the operators that the flat graph calls)
from selective_compile.passes.all_ones import all_ones
from selective_compile.passes.attention import recognise_attention
from selective_compile.passes.attention_calls import AttentionCall
from selective_compile.passes.axes import is_symbolic
from selective_compile.passes.convolutions import whole_convolutions
from selective_compile.passes.evaluate import MarkedError, ancestors
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.flatten import flatten
from selective_compile.passes.fold_constants import fold_constants
from selective_compile.passes.isolate import isolate
from selective_compile.passes.isolated_call import WholeModules
from selective_compile.passes.last_token import take_last_behind
from selective_compile.passes.latents import recognise_latents
from selective_compile.passes.length_conditions import settle_lengths
from selective_compile.passes.linear_attention import whole_linear_attention
from selective_compile.passes.lower import lower
from selective_compile.passes.mask_proof import prove_masks
from selective_compile.passes.merge import merge
from selective_compile.passes.narrow_windows import narrow_windows
from selective_compile.passes.normalise import normalise
from selective_compile.passes.output_tails import Tail, take_off_tails
from selective_compile.passes.overwritten import forget_overwritten
from selective_compile.passes.packed_trace import Traces
from selective_compile.passes.recurrences import recognise_recurrences
from selective_compile.passes.refusals import Refusal, RefusedError
from selective_compile.passes.sampled_rows import keep_sampled_rows
from selective_compile.passes.selections import recognise_selections
from selective_compile.passes.summaries import Summary, behind_layers, take_off_summary
from selective_compile.passes.token_axes import mark_token_axes
from selective_compile.passes.token_wise import call_once
from selective_compile.passes.traced_graph import TracedGraph
from selective_compile.passes.weight_classes import try_weight_classes
from selective_compile.step import LongForm

__all__ = [
    "PIPELINE",
    "AttentionCall",
    "FlatGraph",
    "PassRecord",
    "RefusedError",
    "Refusal",
    "Rewrite",
    "rewrite",
    "rewrite_padded",
]

ANALYSES: tuple[tuple[str, Callable[[TracedGraph], int]], ...] = (
    ("whole convolutions", whole_convolutions),  # before the marks: a convolution reads over a request's bounds
    ("whole linear attention", whole_linear_attention),  # nor is what it cuts one block of a token's own
    ("try weight classes", try_weight_classes),  # before the marks: they take a linear layer for token-wise
    ("mark token axes", mark_token_axes),  # every later proof reads which dimension enumerates tokens
    ("isolate", isolate),  # before what mixes is looked at: masks of isolated modules are none of its business
    ("call once", call_once),  # needs the calls: of these, those that treat tokens independently mix nothing
    ("recognise recurrences", recognise_recurrences),  # before attention, which refuses what mixes and is none
    ("recognise selections", recognise_selections),  # before attention, whose masks may read them
    ("recognise attention", recognise_attention),  # needs the marks: a softmax over keys is one over a token axis
    ("prove masks", prove_masks),  # needs the calls: a mask is what is added to or hides their scores
    ("recognise latents", recognise_latents),  # last: flattening then gives a call whose rows are proved its one pool
)
REWRITES: tuple[tuple[str, Callable[[FlatGraph], int]], ...] = (
    ("fold constants", fold_constants),  # on the flat graph, whose proofs have read how they were made
    ("keep sampled rows", keep_sampled_rows),  # there a row is a token
    ("lower", lower),  # behind all analyses: it names kernels, which none of them reads
    ("merge", merge),  # last: it is by the kernel that a layer went to whether it can be merged
)
NAMED = 3  # attributes, in a refusal
PIPELINE = (*(name for name, _ in ANALYSES), "flatten", *(name for name, _ in REWRITES))


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """What one pass did: values marked, calls found, nodes rewritten; and how long it took."""

    name: str
    count: int
    seconds: float


@dataclass(kw_only=True)
class Rewrite:
    """The pipeline's result: what was proved and, unless something was refused, the flat graph.

    ``long_form``: how requests go on beyond `TracedGraph.long_beyond`, which is for who asked for it to find out.
    ``summary``: what was taken off a padded call, whose outputs are then those of ``traced`` and rows that it reads.
    """

    traced: TracedGraph
    flat: FlatGraph | None = None
    tails: tuple[Tail, ...] = ()
    summary: Summary | None = None
    records: list[PassRecord] = field(default_factory=list)
    long_form: LongForm | None = None

    @property
    def refusals(self) -> list[Refusal]:
        return self.traced.refusals

    @property
    def logits_shape(self) -> tuple[Any, ...]:
        """Shape of the first output in the ``[B, S]`` graph."""
        return tuple(self.traced.output_node.args[0][0].meta["val"].shape)  # type: ignore[index,union-attr]

    def timed(self, name: str, work: Callable[[], int]) -> None:
        start = time.perf_counter()
        count = work()
        self.records.append(PassRecord(name=name, count=count, seconds=time.perf_counter() - start))


def rewrite(
    module: fx.GraphModule,
    examples: Sequence[Any],
    *,
    paged: bool,
    ones: str | None = None,
    functions: Mapping[str, Any] | None = None,
    max_window: int | None = None,
    modules: WholeModules | None = None,
    latents: bool = True,
    traces: Traces | None = None,
    long_form: bool = False,
    blocks: bool = True,
    stores: Sequence[str] = (),
    refused: Collection[str] = (),
) -> Rewrite:
    """Run the pipeline on Dynamo's graph.

    ``paged``: for the engine, with KV pools and sampled rows; otherwise for a padded call, whole in one step.  ``ones``
    is the source of a token input that is never anything but 1, as the engine's attention mask.  ``functions`` are what
    capture left whole, by name, with what they compute; ``modules`` are those that it left whole.  ``max_window``: let
    no attention see farther, whatever the model says; that is no part of the pipeline, for it changes results.
    ``latents``: pools keep what keys and values are made of, where that pays.  ``traces`` has graphs that were traced
    to ATen before, and gets others.  ``long_form``: positions may tell which tokens are of long requests, for a model
    that computes these otherwise.  ``blocks``: a linear attention that is one block of some is taken for a recurrence.
    ``stores``: attributes that the call sets, to be named where that is refused.  ``refused``: nodes to be taken off
    the graph's end, with all that is computed of them; the result tells whether they were.
    What cannot be proved stands in ``refusals`` and leaves ``flat`` None.  Raises
    `RefusedError` when the graph's inputs are not those of a decoder at all.
    """
    traced = normalise(module, examples, traces)
    traced.functions, traced.modules = functions or {}, modules
    if ones is not None:
        all_ones(traced, ones)
    if paged:
        drop_stored_weights(traced, stores)
        forget_overwritten(traced)
        settle_lengths(traced, long_form=long_form)
        take_last_behind(traced)  # in a padded call a head of last tokens is a summary, and stays one
    summary = take_off_summary(traced, refused)
    result = Rewrite(traced=traced, tails=take_off_tails(traced.module), summary=summary)
    if paged and not all(tail.keeps_last for tail in result.tails):
        traced.refuse(traced.output_node, "it cuts off the logits of the last token")
    for name, analysis in ANALYSES:
        if analysis is recognise_latents and not (paged and latents):
            continue
        if analysis is whole_linear_attention and not blocks:
            continue
        try:
            result.timed(name, lambda analysis=analysis: analysis(traced))  # type: ignore[misc]
        except MarkedError as error:
            traced.refuse(traced.output_node, f"what is to be proved of {error} depends on which requests are long")
            return result
    if paged and not traced.refusals:  # a request grows past any length, a padded call tests the one it is called with
        traced.refusals += traced.narrowings
    if traced.refusals:
        return result
    if max_window is not None:
        result.timed("narrow windows", lambda: narrow_windows(traced, max_window))
    try:
        result.timed("flatten", lambda: flatten_into(result, paged=paged, traces=traces))
    except RefusedError as error:  # a trace of the flat graph that fails has its refusals in the error alone
        traced.refusals += [refusal for refusal in error.refusals if refusal not in traced.refusals]
        return result
    flat = result.flat
    assert flat is not None
    for name, transform in REWRITES:
        if paged or transform is not keep_sampled_rows:
            result.timed(name, lambda transform=transform: transform(flat))  # type: ignore[misc]
    return result


def rewrite_padded(module: fx.GraphModule, examples: Sequence[Any], traces: Traces | None = None) -> Rewrite:
    """`rewrite` for a padded call; where something behind the last layer is refused, as a loss is, without that, which
    is then the ``summary``.  Raises `RefusedError` as `rewrite`.
    """
    first = result = rewrite(module, examples, paged=False, traces=traces)
    refused: set[str] = set()
    while result.refusals and (found := behind_layers(first.traced, result.refusals) - refused):
        refused |= found
        result = rewrite(module, examples, paged=False, traces=traces, refused=refused)
        if result.flat is not None:
            return result
    return first


def drop_stored_weights(traced: TracedGraph, stores: Sequence[str]) -> int:
    """Outputs that are weights as they came leave the graph: a forward may assign a buffer to its own name.

    Whatever else it stores in the model is refused: the engine runs no such side effect.
    """
    output, weights = traced.output_node, [given.node for given in traced.inputs if given.place == "weight"]
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    kept = [result for result in results if result not in weights]
    output.args = (tuple(kept),)
    if not kept:
        traced.refuse(output, "its forward must compute its logits, got a weight as it is")
    if len(kept) > 1:
        where = ", ".join(sorted(stores)[:NAMED]) + (", ..." if len(stores) > NAMED else "")
        count = "a value" if len(kept) == 2 else f"{len(kept) - 1} values"
        what = f"{count} that it stores" + (f" in {where}" if where else "")
        traced.refuse(output, f"its forward must give logits and store nothing in the model, got {what}")
    if len(kept) != 1:
        traced.makes_constants = any(map(is_constant, kept))
    traced.module.recompile()
    return len(results) - len(kept)


def is_constant(result: Any) -> bool:
    """Whether it is made of nothing that a call is given."""
    return isinstance(result, fx.Node) and not any(
        is_symbolic(node.meta.get("val")) or node.op == "placeholder" for node in ancestors(result)
    )


def flatten_into(result: Rewrite, *, paged: bool, traces: Traces | None) -> int:
    result.flat = flatten(result.traced, paged=paged, traces=traces)
    return len(result.traced.calls) + len(result.traced.recurrences)
