"""Keep keys and values as int8, where the user asks for it: pools of other rows, which the operator reads and writes.

Before::  key_pool_0 [blocks, K, block_size, D] float32
After::   key_pool_0 [blocks, K, block_size, row_bytes(D)] int8

Precondition: the flat graph is paged, and `EngineConfig.kv_dtype` is "int8"; it changes results, so that it is no part
of the pipeline.  Declines: pools that are int8 already.  What is no attention's key or value stays as it is: the keys
of a sparse indexer, which decide what is attended to, and the states of recurrences, which errors would add up in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from selective_compile.int8_rows import row_bytes
from selective_compile.passes.flat_graph import FlatGraph

# Which arguments of the operators are pools of keys and values.
POOLS = {
    torch.ops.selective.ragged_attention.default: slice(3, 5),
    torch.ops.selective.latent_attention.default: slice(2, 3),
}


def keep_as_int8(flat: FlatGraph) -> int:
    """Give every attention call pools of int8 rows; how many calls got them."""
    places = {node: place for place, node in enumerate(placeholders(flat))}
    changed = 0
    for node in flat.module.graph.nodes:
        pools = pools_of(node)
        for pool in pools:
            example = flat.example_inputs[places[pool]]
            if example.dtype != torch.int8:
                with flat.symbols.mode:
                    kept = example.new_empty([*example.shape[:3], row_bytes(example.shape[3])], dtype=torch.int8)
                flat.example_inputs[places[pool]] = pool.meta["val"] = kept
                changed += pool is pools[0]
    return changed


def pools_of(node: fx.Node) -> Sequence[fx.Node]:
    """Of keys and of values, or of latents alone; none if the node is no attention to pools."""
    return node.args[POOLS[node.target]] if node.target in POOLS else ()  # type: ignore[return-value]


def placeholders(flat: FlatGraph) -> list[fx.Node]:
    return [node for node in flat.module.graph.nodes if node.op == "placeholder"]
