"""PEFT's adapters on a live model: part of the ragged graph; switching them is seen, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import selective_compile as sc
from tests.models import tiny
from tests.test_live_settings import NEW, PROMPTS, RAGGED, alone, ours, told

peft = pytest.importorskip("peft")


def adapted(*names: str) -> Any:
    """A PEFT model over a tiny Llama, an adapter of each name; none of them is nothing."""
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model: Any = peft.get_peft_model(tiny("llama", num_hidden_layers=1), config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    torch.manual_seed(3)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.3)
    return model.eval()


def test_an_adapter_is_part_of_the_ragged_graph_and_switching_it_is_seen() -> None:
    model = adapted("one", "two")
    found = [ours(model)]
    report = sc.explain(model)
    assert found[0] == alone(model) and report.verdict == "ragged"
    assert [call.name for call in report.calls] == ["base_model.model.model.layers.0.self_attn"]
    model.set_adapter("two")
    found.append(ours(model))
    assert found[1] == alone(model)
    with model.disable_adapter():
        found.append(ours(model))
        assert found[2] == alone(model) == alone(tiny("llama", num_hidden_layers=1))
    model.set_adapter("one")
    assert ours(model) == found[0]
    assert len({str(tokens) for tokens in found}) == 3


def test_an_adapter_that_reads_data_of_a_weight_is_part_of_the_ragged_graph() -> None:
    config = peft.HRAConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(tiny("llama", num_hidden_layers=1), config).eval()
    torch.manual_seed(3)
    for name, weight in model.named_parameters():
        if "hra_u" in name:
            nn.init.normal_(weight, std=0.3)
    assert sc.explain(model).verdict == "ragged"
    assert ours(model) == alone(model) != alone(tiny("llama", num_hidden_layers=1))


def test_an_adapter_switched_under_an_engine_is_refused_by_name() -> None:
    model = adapted("one", "two")
    model.set_adapter("one")  # which leaves a name where there was a list of names
    engine = sc.Engine(model, RAGGED)
    assert told(engine) is None
    model.set_adapter("two")
    assert "active_adapter' must stay" in (told(engine) or "")
    model.set_adapter("one")
    with model.disable_adapter():
        assert "disable" in (told(engine) or "")
    model.merge_adapter()
    assert "merged_adapters' must stay []" in (told(engine) or "")
    model.unmerge_adapter()
    assert told(engine) is None


def test_an_adapter_that_learns_is_seen_by_the_next_step() -> None:
    model = adapted("one")
    engine = sc.Engine(model, RAGGED)
    assert list(engine.submit(PROMPTS[1], max_new_tokens=NEW)) == alone(model)[1][len(PROMPTS[1]) :]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.mul_(-2)
    assert list(engine.submit(PROMPTS[1], max_new_tokens=NEW)) == alone(model)[1][len(PROMPTS[1]) :]


def test_merged_adapters_are_plain_linear_layers() -> None:
    model = adapted("one")
    theirs = alone(model)
    model.merge_adapter()
    assert ours(model) == alone(model) == theirs
    merged = model.merge_and_unload()
    assert ours(merged) == alone(merged) == theirs


@pytest.mark.parametrize("fallback", ["refuse", "sequential"])
def test_adapters_that_the_next_call_takes_out_of_the_weights_are_taken_out_once(fallback: Any) -> None:
    """PEFT does so with those that were merged and are switched off since, and keeps a list of the merged ones."""
    model = adapted("one")
    with model.disable_adapter():
        plain = alone(model)
    theirs = alone(model)
    config = sc.EngineConfig(compile=False, fallback=fallback)
    for _ in range(2):
        model.merge_adapter()
        with model.disable_adapter():
            assert ours(model, config) == plain == alone(model)
        assert ours(model, config) == theirs == alone(model)


def test_rows_with_adapters_of_their_own_equal_generate() -> None:
    """PEFT puts their names into hooks, for the whole batch."""
    model = adapted("one", "two")
    ids = torch.tensor([PROMPTS[0][:4]] * 3)
    given: dict[str, Any] = {"input_ids": ids, "max_new_tokens": 6, "pad_token_id": 0}
    own = {"adapter_names": ["one", "two", "__base__"]}
    plain = model.generate(**given)
    expected = model.generate(**given, **own)
    assert len({tuple(row) for row in expected.tolist()}) == 3
    config = sc.EngineConfig(compile=False)
    assert torch.equal(sc.generate(model, **given, **own, engine_config=config), expected)
    with sc.wrapped(model.get_base_model(), config):
        assert torch.equal(model.generate(**given, **own), expected)
        assert torch.equal(model.generate(**given), plain)
    assert torch.equal(model.generate(**given), plain)


def test_an_adapted_model_that_runs_whole_is_served_by_itself() -> None:
    """What PEFT puts around a model is none of transformers' own, so that no engine can run it whole."""
    model = adapted("one")
    layer = model.get_base_model().model.layers[0]
    layer.register_forward_hook(lambda module, given, found: found + 0.3)
    given: dict[str, Any] = {"input_ids": torch.tensor([PROMPTS[0][:4]] * 2), "max_new_tokens": 6, "pad_token_id": 0}
    expected = model.generate(**given)
    assert torch.equal(sc.generate(model, **given, engine_config=sc.EngineConfig(compile=False)), expected)
