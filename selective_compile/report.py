"""What was rewritten and why: a `Report` prints as a page and exports as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from selective_compile.passes import PassRecord, Refusal, Rewrite
from selective_compile.passes.attention_calls import AttentionCall
from selective_compile.passes.batch_dependence import batch_dependent
from selective_compile.passes.refusals import listed
from selective_compile.passes.traced_graph import RecurrentCall

Verdict = Literal["ragged", "isolated", "sequential", "refused"]


@dataclass(frozen=True, kw_only=True)
class CallReport:
    """One attention call: what it was recognised as and what its mask was proved to be.

    ``bytes_per_token``: of its keys and values, as they are in the model; ``kept_bytes_per_token`` of the latents that
    an engine keeps in their place, None where it keeps keys and values.
    """

    name: str
    form: str
    mask: str
    query_heads: int
    kv_heads: int
    head_size: int
    scale: float
    softcap: float
    source_line: str
    bytes_per_token: int
    kept_bytes_per_token: int | None = None


@dataclass(frozen=True, kw_only=True)
class RecurrenceReport:
    """One recurrence or convolution: what it was recognised as, and what is kept of a request between steps.

    ``unlimited_steps``: the limits of its time step hold for prompts alone, as in `generate`."""

    name: str
    family: str
    state_shape: tuple[int, ...]
    state_dtype: str
    source_line: str
    unlimited_steps: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """The verdict on one graph.

    ``ragged``: every operation that mixes tokens is a ragged attention or a ragged recurrence.  Otherwise ``refusals``
    names what could not be proved.  ``isolated``: the modules that hold it, whose paths are ``isolated``, run for one
    request after another, inside the ragged rest.  ``sequential``: the engine runs the whole model for one request
    after another.  ``called_once`` are modules that run by their own Python, once for the tokens of all requests.
    ``refused``: the graph runs as it came, or the engine refuses it.  ``batch_dependent`` names the operations whose
    rows may differ in the last bits with the rows around them, unless the engine is batch-invariant.
    ``long_beyond``: requests of more tokens are computed otherwise, as the model does; None: all alike.
    ``longest``: the most tokens of a request, where the configuration of the model does not say so.
    ``left_out``: attributes that a forward of the model sets and never reads, which an engine leaves as they are.
    """

    model: str
    verdict: Verdict
    token_wise_nodes: int
    calls: tuple[CallReport, ...]
    refusals: tuple[Refusal, ...]
    passes: tuple[PassRecord, ...]
    note: str = ""
    isolated: tuple[str, ...] = ()
    recurrences: tuple[RecurrenceReport, ...] = ()
    batch_dependent: tuple[str, ...] = ()
    called_once: tuple[str, ...] = ()
    long_beyond: int | None = None
    longest: int | None = None
    left_out: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.verdict == "ragged"

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(dataclasses.asdict(self), indent=indent)

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.verdict}"]
        if self.note:
            lines.append(f"  {self.note}")
        if self.calls or self.recurrences or self.isolated:
            lines.append(f"  {self.token_wise_nodes} token-wise operations run once over the tokens of all requests")
        if self.recurrences:
            lines.append(f"  {len(self.recurrences)} recurrences run per request, each with the request's own state:")
            lines += [f"    {text}" for text in grouped_recurrences(self.recurrences)]
        if self.calls:
            lines.append(f"  {len(self.calls)} attention calls run per request:")
            lines += [f"    {text}" for text in grouped(self.calls)]
        if self.called_once:
            lines.append(f"  {len(self.called_once)} modules run as they are, once over the tokens of all requests:")
            lines.append(f"      {shortened(self.called_once)}")
        if self.isolated:
            lines.append(f"  {len(self.isolated)} modules run for one request after another, and share no prefixes:")
            lines.append(f"      {shortened(self.isolated)}")
        if self.long_beyond is not None:
            lines.append(f"  requests of more than {self.long_beyond:,} tokens are computed in the form for such")
        if self.longest is not None:
            lines.append(f"  requests have at most {self.longest:,} tokens: a table ends there, or a branch")
        if self.left_out:
            lines.append(f"  {len(self.left_out)} attributes that the forward sets and never reads stay as they are:")
            lines.append(f"      {shortened(self.left_out)}")
        if self.batch_dependent:
            count = len(self.batch_dependent)
            lines.append(f"  {count} operations depend on the batch in the last bits, without batch_invariant=True:")
            lines += [f"    {text}" for text in grouped_nodes(self.batch_dependent)]
        if self.refusals:
            lines.append(f"  {len(self.refusals)} operations could not be proved:")
            lines += [f"    {text}" for text in listed(self.refusals)]
        return "\n".join(lines)


def grouped(calls: tuple[CallReport, ...]) -> list[str]:
    """One line per kind of call, with the names that share it."""
    kinds: dict[str, list[str]] = {}
    for call in calls:
        heads = f"{call.query_heads}" if call.query_heads == call.kv_heads else f"{call.query_heads}/{call.kv_heads}"
        cap = f", softcap {call.softcap:g}" if call.softcap else ""
        kind = f"{call.form}, {heads} heads of {call.head_size}, scale {call.scale:.4g}{cap}: {call.mask}"
        if call.kept_bytes_per_token is not None:
            kind += f"; latents, {call.kept_bytes_per_token:,} bytes a token and not {call.bytes_per_token:,}"
        kinds.setdefault(kind, []).append(call.name)
    return [f"{len(names):3d} x {kind}\n          {shortened(names)}" for kind, names in kinds.items()]


def grouped_recurrences(recurrences: tuple[RecurrenceReport, ...]) -> list[str]:
    kinds: dict[str, list[str]] = {}
    for call in recurrences:
        limits = ", its time step limited in prompts alone" if call.unlimited_steps else ""
        kind = f"{call.family}, state {list(call.state_shape)} {call.state_dtype}{limits}"
        kinds.setdefault(kind, []).append(call.name)
    return [f"{len(names):3d} x {kind}\n          {shortened(names)}" for kind, names in kinds.items()]


def grouped_nodes(described: Sequence[str]) -> list[str]:
    """Of lines "node: operator, where": one for each operator with its nodes, and where the first was written."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for line in described:
        name, _, rest = line.partition(": ")
        operator, _, place = rest.partition(", ")
        kinds.setdefault(operator, []).append((name, place))
    return [
        f"{len(nodes):3d} x {operator}: {shortened([name for name, _ in nodes])}\n          {brief(nodes[0][1])}"
        for operator, nodes in kinds.items()
    ]


def brief(place: str, width: int = 86) -> str:
    """A place in the source, from the installed package on, with as much of the line as there is room for."""
    place = place.rpartition("site-packages/")[2]
    return place if len(place) <= width else f"{place[: width - 4]} ..."


def shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} ... {names[-1]}"


def report_on(
    rewritten: Rewrite,
    model: str,
    note: str = "",
    *,
    isolated: Mapping[str, Refusal] | None = None,
    longest: int | None = None,
) -> Report:
    """On a graph and, of each module that is isolated in it, why; ``longest``: as in `Report`."""
    apart = isolated or {}
    traced = rewritten.traced
    attention = {node for call in traced.calls for node in call.covers}
    mixing = attention | {call.output for call in traced.recurrences}
    marked = sum(node.op == "call_function" and node not in mixing for node in traced.axes)
    return Report(
        model=model,
        verdict="refused" if rewritten.flat is None else "isolated" if apart else "ragged",
        token_wise_nodes=marked,
        calls=tuple(call_report(call) for call in traced.calls if call.family is not None),
        refusals=(*dict.fromkeys(apart.values()), *traced.refusals),
        isolated=tuple(apart),
        called_once=tuple(dict.fromkeys(call.module for call in traced.isolated if call.module not in apart)),
        recurrences=tuple(recurrence_report(call) for call in traced.recurrences),
        long_beyond=None if rewritten.long_form is None else rewritten.long_form.beyond,
        longest=longest,
        left_out=traced.left_out,
        passes=tuple(rewritten.records),
        note=note,
        batch_dependent=batch_dependent(rewritten.flat) if rewritten.flat is not None else (),
    )


def refused_report(
    model: str, note: str, refusals: tuple[Refusal, ...] = (), *, verdict: Verdict = "refused"
) -> Report:
    return Report(model=model, verdict=verdict, token_wise_nodes=0, calls=(), refusals=refusals, passes=(), note=note)


def recurrence_report(call: RecurrentCall) -> RecurrenceReport:
    return RecurrenceReport(
        name=call.name,
        family=call.family,
        state_shape=call.state_shape,
        state_dtype=str(call.state_dtype).removeprefix("torch."),
        source_line=call.source_line,
        unlimited_steps=call.unlimited_steps,
    )


def call_report(call: AttentionCall) -> CallReport:
    width = call.key.node.meta["val"].dtype.itemsize
    return CallReport(
        name=call.name,
        form=call.form,
        mask=str(call.family) + ("" if call.selection is None else f", {call.selection}"),
        query_heads=call.query.heads,
        kv_heads=call.key.heads,
        head_size=call.key.head_size,
        scale=call.scale,
        softcap=call.softcap,
        source_line=call.source_line,
        bytes_per_token=call.key.heads * (call.key.head_size + call.value.head_size) * width,
        kept_bytes_per_token=None if call.latent is None else call.latent.row_size * width,
    )
