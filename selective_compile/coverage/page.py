"""The page that shows a sweep: `docs/coverage.md`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from selective_compile.coverage.families import FAMILIES, family_of
from selective_compile.coverage.oracle import TOLERANCE
from selective_compile.coverage.standing import GROWTH, GROWTH_SECONDS, VERDICTS, bars, exact, verdict, wrong
from selective_compile.coverage.sweep import registered_types

INTRO = """# Coverage

{count} of the {registered} model types that transformers registers with AutoModelForCausalLM, each as a tiny model
with random weights in float32 ({versions}). Written by `selective-compile coverage`.

The engine serves requests of random lengths that arrive while others run, with a small token budget and memory for the
longest request alone, so that requests are preempted and long prompts cut. Its tokens are compared with
`model.generate` on each request alone, and its logits, which may differ by {tolerance:g} of their spread. *Padded* is
the same for the compiled model called with rows padded left, right and both; *as it came* says that such a call runs
through Inductor unchanged, for the reason named. *Isolated* models run the modules concerned for one request after
another and all else for all of them, *sequential* ones run whole. Tokens are *open* where the model's own `generate`
and `forward` contradict each other for a request, as a choice among equal scores makes them, and the engine's are
neither's.

After a change of the code or of the versions, the same command measures what that concerns; of a new release of
transformers, `selective-compile coverage --new --out docs/coverage.json` measures only the types that the table does
not have.
"""
HEADER = ("type", "class", "verdict", "tokens", "logits", "preempted", "padded", "compile", "attention, or why not")


def page(results: Mapping[str, Any]) -> str:
    """Markdown: the bars, what is wrong, totals by family, then a table of every type."""
    types = results["types"]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    intro = INTRO.format(count=len(types), registered=len(registered_types()), versions=versions, tolerance=TOLERANCE)
    lines = [
        *intro.splitlines(),
        "",
        *summary(types),
        *mistakes(types),
        *families(types),
        *seconds(types),
    ]
    for family in FAMILIES:
        members = {name: facts for name, facts in types.items() if family_of(name) == family}
        if members:
            lines += ["", f"## {family.capitalize()}", "", *table(HEADER, [row(*item) for item in members.items()])]
    return "\n".join(lines) + "\n"


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    cells = [header, tuple("---" for _ in header), *rows]
    return ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in cells]


def summary(types: Mapping[str, Any]) -> list[str]:
    rows = [(what, str(count), bar, "yes" if met else "**no**") for what, count, bar, met in bars(types)]
    return table(("what", "count", "bar", "met"), rows)


def mistakes(types: Mapping[str, Any]) -> list[str]:
    found = [(name, wrong(facts)) for name, facts in types.items() if wrong(facts)]
    return ["", "## Wrong without a refusal", "", *table(("type", "what"), found)] if found else []


def families(types: Mapping[str, Any]) -> list[str]:
    rows = []
    for family in FAMILIES:
        members = [facts for name, facts in types.items() if family_of(name) == family]
        counts = [sum(verdict(facts) == name for facts in members) for name in VERDICTS]
        if members:
            rows.append((family, str(len(members)), str(sum(map(exact, members))), *map(str, counts)))
    return ["", "## By family", "", *table(("family", "types", "exact", *VERDICTS), rows)]


def seconds(types: Mapping[str, Any]) -> list[str]:
    taken = {name: facts["compile_seconds"] for name, facts in types.items() if "compile_seconds" in facts}
    if not taken:
        return []
    worst = max(taken, key=lambda name: taken[name])
    median = statistics.median(taken.values())
    slower = [(name, facts["grown"]) for name, facts in types.items() if "grown" in facts]
    return [
        "",
        f"Capturing, proving and rewriting took {median:.1f} s in the median, {taken[worst]:.1f} s for {worst}, of one",
        f"thread of a CPU. It is watched: types for which it takes over {GROWTH:g} times and {GROWTH_SECONDS:g} s more",
        "than when they were measured before stand here" + (":" if slower else "; there is none."),
        *(["", *table(("type", "what"), slower)] if slower else []),
    ]


def row(name: str, facts: Mapping[str, Any]) -> tuple[str, ...]:
    engine = facts.get("engine")
    return (
        name,
        str(facts.get("class", "")),
        f"**{verdict(facts)}**" if wrong(facts) else verdict(facts),
        tokens(engine),
        f"{engine['error']:.0e}" if engine else "",
        str(engine["preemptions"]) if engine else "",
        padded(facts.get("padded", {})),
        f"{facts['compile_seconds']:.1f} s" if "compile_seconds" in facts else "",
        remark(facts),
    )


def tokens(engine: Mapping[str, Any] | None) -> str:
    if engine is None:
        return ""
    ties = f", {engine['near_ties']} near ties" if engine["near_ties"] else ""
    return f"{engine['tokens']} ({engine['generated']}{ties})"


def padded(batches: Mapping[str, Any]) -> str:
    if not batches:
        return ""
    worst = max(batch["error"] for batch in batches.values())
    return f"{worst:.0e}" + (", as it came" if any(batch["refused"] for batch in batches.values()) else "")


def remark(facts: Mapping[str, Any]) -> str:
    """The attention that was proved, the first refusal with its line, or the error."""
    if "failure" in facts:
        failure = facts["failure"]
        where = f" (`{failure['source_line']}`)" if failure.get("source_line") else ""
        return f"{failure['stage']}: {failure['error']}{where}"
    if facts.get("refusals"):
        first = facts["refusals"][0]
        more = f", and {facts['refusal_count'] - 1} more" if facts["refusal_count"] > 1 else ""
        where = f" in {first['module']}" if first["module"] else ""
        apart = f"{len(facts['isolated'])} modules isolated: " if facts.get("isolated") else ""
        return f"{apart}`{first['operator']}`{where}: {first['reason']} (`{first['source_line']}`){more}"
    calls = facts.get("calls", [])
    kinds = [f"{calls.count(kind)} x {kind}" for kind in dict.fromkeys(calls)]
    return "; ".join([*kinds, *([] if facts.get("causal", True) else ["the model itself is not causal"])])
