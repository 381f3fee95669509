"""What changes in a live model beside its weights: adapters, hooks, attributes.  It is seen, or refused by name."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import selective_compile as sc
from selective_compile.capture import capture
from selective_compile.live_settings import LiveSettings
from tests.models import VOCABULARY, tiny

PROMPTS = [[1, 5, 7], [1, 9, 22, 33, 4]]
EAGER = sc.EngineConfig(compile=False)
RAGGED = sc.EngineConfig(compile=False, fallback="refuse")
NEW = 6


def small() -> Any:
    """Of one layer: what is read of a module does not depend on how many there are."""
    return tiny("llama", num_hidden_layers=1)


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
        return self.layer(x) * (self.factor if self.on else 0.25) * (1 if self.names[0] == "a" else -2)


def scaled() -> Any:
    model = small()
    layer = model.model.layers[0].mlp
    layer.down_proj = Scaled(layer.down_proj)
    return model, layer.down_proj


def test_an_attribute_that_the_forward_reads_is_seen_by_the_next_call() -> None:
    model, layer = scaled()
    found = [alone(model)]
    assert ours(model) == found[0]
    for name, value in (("factor", -3.0), ("on", False), ("names", ["b"])):
        setattr(layer, name, value)
        found.append(alone(model))
        assert found[-1] != found[-2] and ours(model) == found[-1], name


def test_an_engine_of_ones_own_refuses_a_changed_attribute_by_name_until_it_is_as_it_was() -> None:
    model, layer = scaled()
    with sc.Engine(model, RAGGED).running() as engine:
        assert told(engine) is None
        layer.names.append("b")
        assert "'model.layers.0.mlp.down_proj.names' must stay ['a'], as compiled" in (told(engine) or "")
        layer.names.pop()
        layer.unread = 7
        assert told(engine) is None
        layer.forward = lambda x: x
        assert "got another of 'model.layers.0.mlp.down_proj'" in (told(engine) or "")


def test_training_mode_after_compiling_is_refused() -> None:
    model = small()
    engine = sc.Engine(model, RAGGED)
    model.train()
    with pytest.raises((ValueError, RuntimeError), match="training' must stay False"):
        raise RuntimeError(told(engine))


# Hooks


def test_a_hook_that_reads_runs_with_the_model_itself_request_by_request() -> None:
    model: Any = small()
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
    model: Any = small()
    engine = sc.Engine(model, RAGGED)
    assert told(engine) is None
    handle = getattr(model.model.layers[0].mlp, kind)(lambda *_: None)
    assert "got one of 'model.layers.0.mlp'" in (told(engine) or "")
    handle.remove()
    assert told(engine) is None


def test_hooks_by_which_transformers_records_hidden_states_are_in_nobodys_way() -> None:
    model: Any = small()
    engine = sc.Engine(model, RAGGED)
    with torch.no_grad():
        model(torch.tensor([PROMPTS[0]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules()), "they stay"
    assert told(engine) is None and ours(model) == alone(model)
    assert sc.explain(model).verdict == "ragged"


def test_hooks_that_training_leaves_are_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers and by peft; one of the same name that is of neither is felt."""
    peft = pytest.importorskip("peft")
    model = small()
    engine, expected = sc.Engine(model, RAGGED), alone(model)
    model.enable_input_require_grads()
    assert told(engine) is None and ours(model) == expected
    with monkeypatch.context() as patched:
        patched.delattr(PreTrainedModel, "enable_input_require_grads")
        patched.setattr(model, "is_loaded_in_8bit", True, raising=False)
        patched.setattr(model, "gradient_checkpointing_enable", lambda: None)
        peft.prepare_model_for_kbit_training(model)
    assert len(model.get_input_embeddings()._forward_hooks) == 2
    model.train()
    model(torch.tensor(PROMPTS[:1]), labels=torch.tensor(PROMPTS[:1])).loss.backward()
    model.eval()
    assert ours(model) == expected and sc.explain(model).verdict == "ragged"

    def make_inputs_require_grads(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 1

    model.get_input_embeddings().register_forward_hook(make_inputs_require_grads)
    with pytest.raises(ValueError, match="make_inputs_require_grads is to see each call"):
        ours(model)


def test_a_hook_of_all_modules_is_refused_too() -> None:
    model = small()
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
    model: Any = small()
    plain = alone(model)
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: output * -2)
    assert alone(model) != plain and ours(model, EAGER) == alone(model)


def test_a_padded_call_runs_the_hooks_that_dynamo_sees() -> None:
    model: Any = small()
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


class Half:
    """Not a module, and not of plain values either."""

    def __init__(self) -> None:
        self.factor = 1.5


class Parts(nn.Module):
    """A linear layer that reads what is not an attribute of its own of numbers and texts."""

    at_large = 1.5

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.held, self.act, self.shift = layer, Half(), torch.relu, torch.zeros(1)
        self.deep = {"a": {"b": {"c": [1.5]}}}

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.at_large

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.times(self.act(self.layer(x))) * self.held.factor * self.deep["a"]["b"]["c"][0] + self.shift


def parts() -> Any:
    class Own(Parts):  # of this model alone, so that changing it changes no other
        pass

    model = small()
    layer = model.model.layers[0].mlp
    layer.down_proj = Own(layer.down_proj)
    return model, layer.down_proj


def another_method(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * -3


CHANGES: dict[str, Any] = {
    "attribute of an object": lambda part: setattr(part.held, "factor", -3.0),
    "another object": lambda part: setattr(part, "held", Half()) or setattr(part.held, "factor", -3.0),
    "function": lambda part: setattr(part, "act", torch.tanh),
    "tensor": lambda part: setattr(part, "shift", torch.ones(1)),
    "deep in a dictionary": lambda part: part.deep["a"]["b"]["c"].append(part.deep["a"]["b"]["c"].pop() - 4),
    "its own in place of its class's": lambda part: setattr(part, "at_large", -3.0),
    "its own method": lambda part: setattr(part, "times", lambda x: x * -3),
    "attribute of the class": lambda part: setattr(type(part), "at_large", -3.0),
    "method of the class": lambda part: setattr(type(part), "times", another_method),
    "forward of the class": lambda part: setattr(type(part), "forward", another_method),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_else_a_forward_reads_is_watched(change: Any) -> None:
    model, part = parts()
    settings = LiveSettings(model, capture(model).read)
    assert settings.change() == ""
    part.unread = part.held.unread = object()
    type(part).unread = 3
    assert settings.change() == ""
    change(part)
    assert "must stay" in settings.change() and "compiled" in settings.change()


def test_a_changed_method_of_a_class_is_compiled_anew_and_refused_by_an_engine() -> None:
    model, part = parts()
    before = alone(model)
    engine = sc.Engine(model, RAGGED)
    assert ours(model) == before and told(engine) is None
    type(part).times = another_method
    after = alone(model)
    assert after != before and ours(model) == after
    assert "'times' of Own must stay" in (told(engine) or "")


def test_a_field_of_the_configuration_that_the_forward_reads_is_seen_and_no_other() -> None:
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    model: Any = tiny("gemma2", final_logit_softcapping=30.0, **one)
    engine = sc.Engine(model, RAGGED)
    assert ours(model) == alone(model)
    model.config.unheard_of = 7
    model.config.pad_token_id = 3
    assert told(engine) is None
    model.config.final_logit_softcapping = 0.01
    assert "'config.final_logit_softcapping' must stay 30.0, as compiled" in (told(engine) or "")
    rows = sc.generate(
        model, PROMPTS[:1], max_new_tokens=2, engine_config=RAGGED, return_dict_in_generate=True, output_logits=True
    )
    assert float(rows.logits[0].abs().max()) <= 0.01


def test_a_model_is_freed_that_holds_itself_in_an_object_that_it_reads() -> None:
    model, part = parts()
    part.held.back = model
    engine = sc.Engine(model, RAGGED)
    assert told(engine) is None
    alive = weakref.ref(part.held)
    del engine, part, model
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


def test_a_weight_that_is_given_other_memory_is_seen() -> None:
    model = small()
    engine = sc.Engine(model, sc.EngineConfig(compile=False, max_kv_tokens=256, block_size=8))
    prompt = list(range(1, 40))
    engine.submit(prompt, max_new_tokens=4).result()
    weight = model.model.layers[0].self_attn.v_proj.weight
    weight.data = weight.data.flip(0).clone()
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0, len(prompt) :].tolist()
    # Nothing that was computed of the prompt before is used.
    assert list(engine.submit(prompt, max_new_tokens=4, do_sample=False).result().tokens) == expected


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_layer_of_torchscript_runs_by_itself() -> None:
    model = small()
    model.model.layers[0].mlp = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).requires_grad_(False)
    expected = alone(model)
    model.model.layers[0].mlp = torch.jit.script(model.model.layers[0].mlp)
    assert ours(model, EAGER) == expected


def test_an_engine_goes_on_where_somebody_wraps_its_model() -> None:
    """`generate` has the decorator of functions that the forward calls, and is none of them."""
    model = small()
    engine = sc.Engine(model, EAGER)
    with sc.wrapped(model, EAGER):
        assert told(engine) is None
    assert told(engine) is None
