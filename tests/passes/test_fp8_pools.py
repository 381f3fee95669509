"""Pools of e4m3 in place of the model's dtype: which, how many, with which scales."""

from __future__ import annotations

import torch

from selective_compile.passes.fp8_pools import keep_as_fp8
from selective_compile.passes.int8_pools import placeholders, pools_of
from selective_compile.rewriting import captured_and_rewritten
from tests.models import tiny
from tests.prefix_models import prefix_model


def test_every_attention_gets_pools_of_e4m3_and_scales() -> None:
    flat = captured_and_rewritten(tiny("gemma3_text"), {})[1].flat
    assert flat is not None
    before = dict(zip(placeholders(flat), flat.example_inputs, strict=True))
    assert keep_as_fp8(flat) == 2
    after = dict(zip(placeholders(flat), flat.example_inputs, strict=True))
    added = [node for node in after if node not in before]
    assert list(after)[-4:] == added and all(after[node].dtype == torch.float32 for node in added)
    pools = [node for node, example in before.items() if after[node].dtype != example.dtype]
    assert [after[node].dtype for node in pools] == [torch.float8_e4m3fn] * 4
    assert all(after[node].shape == before[node].shape and after[node] is node.meta["val"] for node in pools)
    calls = [node for node in flat.module.graph.nodes if "key_scales" in node.kwargs]
    assert [node for call in calls for node in call.args[3:5]] == pools
    assert [node for call in calls for node in (call.kwargs["key_scales"], call.kwargs["value_scales"])] == added
    assert [node.meta["val"].shape for node in added] == [node.meta["val"].shape[1:2] for node in pools]
    assert keep_as_fp8(flat) == 0


def test_scales_behind_what_was_given_take_the_places_of_none() -> None:
    """The prefix is the last argument, so that those in front of it are given, too."""
    flat = captured_and_rewritten(prefix_model(5), {})[1].flat
    assert flat is not None
    assert keep_as_fp8(flat) == 2
    calls = [node for node in flat.module.graph.nodes if pools_of(node)]
    assert len(calls) == 2
    for call in calls:
        given = call.normalized_arguments(flat.module, normalize_to_only_use_kwargs=True)
        assert given is not None and given.kwargs["prefix"] == 5
        assert given.kwargs["key_scales"].meta["val"].shape == given.kwargs["value_scales"].meta["val"].shape == (2,)
    assert keep_as_fp8(flat) == 0


def test_latents_have_one_scale() -> None:
    flat = captured_and_rewritten(tiny("deepseek_v3"), {})[1].flat
    assert flat is not None
    assert keep_as_fp8(flat) == len(flat.calls) > 0
    for node in flat.module.graph.nodes:
        if node.target is torch.ops.selective.latent_attention.default:
            assert node.args[2].meta["val"].dtype == torch.float8_e4m3fn and set(node.kwargs) == {"key_scales"}
            assert node.kwargs["key_scales"].meta["val"].shape == (1,)
    assert keep_as_fp8(flat) == 0
