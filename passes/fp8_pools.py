"""Keep keys and values as e4m3, where the user asks for it: pools of another dtype, and the scales of their heads.

Before::  ragged_attention(query, key, value, key_pool_0, value_pool_0, ...)       key_pool_0 [blocks, K, block_size, D]
After::   ragged_attention(..., key_scales=key_pool_0_scales, value_scales=value_pool_0_scales)
          key_pool_0 float8_e4m3fn; key_pool_0_scales [K] float32, a placeholder behind all others, and so on;
          attention to latents has key_scales [1] alone

Precondition: the flat graph is paged, and `EngineConfig.kv_dtype` is "fp8"; it changes results, so that it is no part
of the pipeline.  Declines: pools that are e4m3 already.  What is no attention's key or value stays as it is, as in
`int8_pools`.
"""

from __future__ import annotations

import torch
from torch import fx

from selective_compile import fp8_rows
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.int8_pools import placeholders, pools_of


def keep_as_fp8(flat: FlatGraph) -> int:
    """Give every attention call pools of e4m3 and scales, in the order of the calls; how many calls got them."""
    places = {node: place for place, node in enumerate(placeholders(flat))}
    changed = 0
    for node in flat.module.graph.nodes:
        pools = pools_of(node)
        if any(pool.meta["val"].dtype != fp8_rows.DTYPE for pool in pools):
            changed += 1
            for name, pool in zip(("key_scales", "value_scales"), pools, strict=False):
                give(node, name, narrowed(flat, pool, places[pool]))
    if changed:
        flat.module.graph.lint()
        flat.module.recompile()
    return changed


def give(call: fx.Node, name: str, value: fx.Node) -> None:
    """Change one argument of an op's call, which is given by its place where one behind it is."""
    place = [argument.name for argument in call.target._schema.arguments].index(name)  # type: ignore[union-attr]
    if place < len(call.args):
        call.update_arg(place, value)
    else:
        call.update_kwarg(name, value)


def narrowed(flat: FlatGraph, pool: fx.Node, place: int) -> fx.Node:
    """The scales [K] of the pool, which becomes e4m3."""
    graph = flat.module.graph
    with graph.inserting_after(placeholders(flat)[-1]):
        scales = graph.placeholder(f"{pool.name}_scales")
    with flat.symbols.mode:
        example = flat.example_inputs[place].to(fp8_rows.DTYPE)
        scales.meta["val"] = torch.empty(example.shape[1], dtype=torch.float32, device=flat.device)
    flat.example_inputs[place] = pool.meta["val"] = example
    flat.example_inputs.append(scales.meta["val"])
    return scales
