"""Narrow what attention sees, where the user asks for it: with `int8_pools`, a pass that changes results.

Before::  causal                        window 4096                 chunks of 512
After::   causal, window 1024           window 1024                 chunks of 512, window 1024

Precondition: the masks are proved, and `EngineConfig.max_attention_window` says 1024.
Declines: an attention whose window, or chunk, is as small already.  Refuses one to selected keys, among which there may
be none of the last ones, and one with a prefix, which no kernel has beside a window.
"""

from __future__ import annotations

from dataclasses import replace

from selective_compile.passes.traced_graph import TracedGraph


def narrow_windows(traced: TracedGraph, window: int) -> int:
    """Let no attention see more than the last `window` positions; how many saw more."""
    narrowed = 0
    for call in traced.calls:
        family = call.family
        if family is None or any(0 < size <= window for size in (family.window, family.chunk)):
            continue
        if call.selection is not None:
            traced.refuse(call.output, f"its keys are selected among all, so that it cannot be narrowed to {window}")
            continue
        if family.prefix:
            traced.refuse(call.output, f"all tokens see its prefix, so that it cannot be narrowed to {window}")
            continue
        call.family = replace(family, window=window, narrowed=True)
        narrowed += 1
    return narrowed
