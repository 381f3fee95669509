"""What changes in a live model beside its weights: adapters, hooks, attributes.  It is seen, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import selective_compile as sc
from tests.models import VOCABULARY, tiny

PROMPTS = [[1, 5, 7], [1, 9, 22, 33, 4]]
EAGER = sc.EngineConfig(compile=False)
RAGGED = sc.EngineConfig(compile=False, fallback="refuse")
NEW = 6


def alone(model: Any) -> list[list[int]]:
    """Hugging Face's own tokens of each prompt."""
    rows = [torch.tensor([prompt]) for prompt in PROMPTS]
    options = {"max_new_tokens": NEW, "do_sample": False}
    return [model.generate(input_ids=r, attention_mask=torch.ones_like(r), **options)[0].tolist() for r in rows]


def ours(model: Any, config: sc.EngineConfig = RAGGED) -> list[list[int]]:
    return [row.tolist() for row in sc.generate(model, PROMPTS, max_new_tokens=NEW, engine_config=config)]


def told(engine: sc.Engine) -> str | None:
    result = engine.submit(PROMPTS[0], max_new_tokens=2).result()
    return result.error if result.finish_reason == "error" else None


class Scaled(nn.Module):
    """A linear layer and what a forward may ask of its object."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.factor, self.on, self.names = layer, 1.5, True, ["a"]
        self.unread = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (self.factor if self.on and self.names[0] == "a" else 0.25)


def scaled() -> Any:
    model = tiny("llama")
    layer = model.model.layers[1].mlp
    layer.down_proj = Scaled(layer.down_proj)
    return model, layer.down_proj


@pytest.mark.parametrize(("name", "value"), [("on", False), ("factor", -3.0), ("names", ["b"])])
def test_an_attribute_that_the_forward_reads_is_seen_by_the_next_call(name: str, value: Any) -> None:
    model, layer = scaled()
    before = alone(model)
    assert ours(model) == before
    setattr(layer, name, value)
    after = alone(model)
    assert after != before and ours(model) == after


def test_an_engine_of_ones_own_refuses_a_changed_attribute_by_name_until_it_is_as_it_was() -> None:
    model, layer = scaled()
    with sc.Engine(model, RAGGED).running() as engine:
        assert told(engine) is None
        layer.names.append("b")
        assert "'model.layers.1.mlp.down_proj.names' must stay ['a'], as compiled" in (told(engine) or "")
        layer.names.pop()
        layer.unread = 7
        assert told(engine) is None
        layer.forward = lambda x: x
        assert "got another of 'model.layers.1.mlp.down_proj'" in (told(engine) or "")


def test_training_mode_after_compiling_is_refused() -> None:
    model = tiny("llama")
    engine = sc.Engine(model, RAGGED)
    model.train()
    with pytest.raises((ValueError, RuntimeError), match="training' must stay False"):
        raise RuntimeError(told(engine))


# Hooks


def test_a_hook_that_reads_runs_with_the_model_itself_request_by_request() -> None:
    model: Any = tiny("llama")
    seen: list[tuple[int, ...]] = []
    handle = model.model.layers[0].register_forward_hook(lambda _, __, output: seen.append(tuple(output.shape)))
    theirs = alone(model)
    of_theirs = sorted(seen)
    seen.clear()
    assert ours(model, EAGER) == theirs
    assert sorted(seen) == of_theirs  # whole prompts, then token by token: as generate calls it
    report = sc.explain(model)
    assert report.verdict == "sequential" and "test_live_settings.py" in str(report)
    assert sorted(seen) == of_theirs, "explaining calls no hook"
    with pytest.raises(ValueError, match=r"forward hook \(hook\) in model.layers.0: .*lambda.* is to see each call"):
        ours(model)
    handle.remove()
    assert ours(model, RAGGED) == theirs and ours(model, EAGER) == theirs
    assert sorted(seen) == of_theirs and sc.explain(model).verdict == "ragged"


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_that_comes_after_compiling_is_refused_by_name(kind: str) -> None:
    model: Any = tiny("llama")
    engine = sc.Engine(model, RAGGED)
    assert told(engine) is None
    handle = getattr(model.model.layers[1].mlp, kind)(lambda *_: None)
    assert "got one of 'model.layers.1.mlp'" in (told(engine) or "")
    handle.remove()
    assert told(engine) is None


def test_hooks_by_which_transformers_records_hidden_states_are_in_nobodys_way() -> None:
    model: Any = tiny("llama")
    engine = sc.Engine(model, RAGGED)
    with torch.no_grad():
        model(torch.tensor([PROMPTS[0]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules()), "they stay"
    assert told(engine) is None and ours(model) == alone(model)
    assert sc.explain(model).verdict == "ragged"


def test_a_hook_of_all_modules_is_refused_too() -> None:
    model = tiny("llama")
    engine = sc.Engine(model, RAGGED)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert "got one of all modules" in (told(engine) or "")
        with pytest.raises(ValueError, match="forward hook"):
            sc.Engine(model, RAGGED)
    finally:
        handle.remove()
    assert told(engine) is None


def test_a_hook_that_changes_an_activation_changes_ours_alike() -> None:
    model: Any = tiny("llama")
    plain = alone(model)
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: output * -2)
    assert alone(model) != plain and ours(model, EAGER) == alone(model)


def test_a_padded_call_runs_the_hooks_that_dynamo_sees() -> None:
    model: Any = tiny("llama")
    seen: list[torch.Tensor] = []
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: seen.append(output))
    ids = torch.randint(1, VOCABULARY, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        theirs = model(ids, attention_mask=mask).logits
        (kept,) = seen
        seen.clear()
        fast = torch.compile(model, backend="selective", options={"inductor": False})
        logits = fast(ids, attention_mask=mask).logits
    real = mask.bool()
    assert torch.allclose(logits[real], theirs[real], atol=1e-4)
    assert len(seen) == 1 and torch.allclose(seen[0][real], kept[real], atol=1e-4)
