"""What the facts of a type amount to, and how far the whole sweep is from its bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from selective_compile.coverage.families import DENSE, EXPERTS, HYBRID, RECURRENT
from selective_compile.coverage.oracle import TOLERANCE

GROWTH, GROWTH_SECONDS = 1.5, 5.0  # of compiling: less comes and goes with the machine

Facts = Mapping[str, Any]

# From the best to the worst that is honest.  What the engine computes wrongly stands apart: see `wrong`.
VERDICTS: Final = ("ragged", "isolated", "sequential", "refused", "failed", "not built")


def verdict(facts: Facts) -> str:
    """One of `VERDICTS`: ``failed`` where an error ended the measuring, ``not built`` where there is no model."""
    if "class" not in facts:
        return "not built"
    return str(facts.get("verdict", "failed"))


def exact(facts: Facts) -> bool:
    """Whether the engine gave the tokens and the logits of the oracle."""
    engine = facts.get("engine")
    return engine is not None and engine["tokens"] == "equal" and engine["error"] < TOLERANCE


def wrong(facts: Facts) -> str:
    """What is wrong without having been refused; empty if nothing is."""
    engine = facts.get("engine")
    found = []
    if engine is not None and engine["tokens"] == "wrong":
        found.append(f"engine: other tokens ({engine['first_wrong']})")
    elif engine is not None and engine["tokens"] != "open" and engine["error"] >= TOLERANCE:
        found.append(f"engine: logits differ by {engine['error']:.1g} of their spread")
    for name, batch in facts.get("padded", {}).items():
        if batch["error"] >= TOLERANCE:
            found.append(f"padded {name}: logits differ by {batch['error']:.1g} of their spread")
    return "; ".join(found)


def worse(facts: Facts, than: Facts) -> str:
    """What has become worse since ``than``; empty if nothing has."""
    now, before = verdict(facts), verdict(than)
    if VERDICTS.index(now) > VERDICTS.index(before):
        return f"{before} has become {now}"
    if exact(than) and not exact(facts):
        return "the engine was exact"
    return wrong(facts)


def grown(facts: Facts, than: Facts) -> str:
    """How much more compiling takes than it did, if that is much; empty if it is not, or nothing is known of before."""
    now, before = facts.get("compile_seconds"), than.get("compile_seconds")
    if now is None or before is None or now <= GROWTH * before or now - before <= GROWTH_SECONDS:
        return ""
    return f"compiling takes {now:.1f} s, took {before:.1f} s"


def bars(types: Mapping[str, Facts]) -> list[tuple[str, int, str, bool]]:
    """Each bar: what is counted, how many, what it must be, and whether it is met."""
    every = list(types.values())
    decoders = [facts for facts in every if facts.get("family") in (DENSE, EXPERTS)]
    recurrent = [facts for facts in every if facts.get("family") in (HYBRID, RECURRENT)]
    counts = {name: sum(verdict(facts) == name for facts in every) for name in VERDICTS}
    same = sum(map(exact, every))
    ragged = sum(verdict(facts) == "ragged" for facts in decoders)
    flowing = sum(verdict(facts) == "ragged" for facts in recurrent)
    lies = sum(bool(wrong(facts)) for facts in every)
    return [
        ("types whose tokens equal the oracle's", same, "at least 170", same >= 170),
        (f"of {len(decoders)} dense decoders and mixtures of experts, ragged", ragged, "at least 104", ragged >= 104),
        (f"of {len(recurrent)} hybrid and recurrent types, ragged", flowing, "at least 12", flowing >= 12),
        ("sequential", counts["sequential"], "at most 10", counts["sequential"] <= 10),
        ("wrong without a refusal", lies, "0", lies == 0),
    ]
