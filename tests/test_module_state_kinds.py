"""Modules that a forward replaces, and buffers that it writes in whatever way, are each request's own, too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BigBirdConfig, BigBirdForCausalLM, LlamaConfig

import selective_compile as sc
from selective_compile.module_state import own_attributes
from tests.models import tiny
from tests.test_module_state import CONFIG, SIZES, Counted, Shift, Untraceable, alone


class Part(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor


class Swapping(nn.Module):
    """As BigBird puts another attention in the place of its own when a prompt is short."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part(2.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.part.factor == 2.0:
            self.part = Part(3.0)
        return x * self.part.factor


def test_a_module_that_a_run_puts_in_anothers_place_is_that_runs_own() -> None:
    model = Swapping()
    own = model.part
    for _ in range(2):
        with own_attributes(model, {}) as left:
            assert float(model(torch.ones(()))) == 3.0
        assert model.part is own and own.factor == 2.0
    with own_attributes(model, left):
        assert model.part.factor == 3.0
    assert model.part is own


class Counting(Shift):
    """Keeps how often it was called in a part that each call puts in the place of the last one."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__(mlp, "tensor")
        self.part = Part(1.0)

    def forward(self, x: Tensor) -> Any:
        self.part = Part(self.part.factor + 0.5)
        return self.mlp(x) * self.part.factor


def test_each_request_has_its_own_parts() -> None:
    model = tiny("llama", num_hidden_layers=1, initializer_range=0.15)
    model.model.layers[0].mlp = counting = Counting(model.model.layers[0].mlp)
    prompts = [[1, 5, 7], [9, 3]]
    expected = [alone(copy.deepcopy(model), prompt, 5) for prompt in prompts]
    engine = sc.Engine(model, CONFIG)
    requests = [engine.submit(prompt, max_new_tokens=5, do_sample=False) for prompt in prompts]
    assert [list(request.result().tokens) for request in requests] == expected
    assert counting.part.factor == 1.0


def test_big_bird_is_left_with_the_attention_that_it_had() -> None:
    """A short prompt makes it put another attention in the place of its own, in every layer."""
    config = BigBirdConfig(
        **{name: value for name, value in SIZES.items() if name != "num_key_value_heads"},
        max_position_embeddings=256,
        is_decoder=True,
        block_size=4,
        num_random_blocks=1,
    )
    torch.manual_seed(0)
    model = BigBirdForCausalLM(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    prompts = [[5, 17, 33, 71], [(7 * i) % 90 + 1 for i in range(64)], [9, 3, 2]]
    expected = [alone(copy.deepcopy(model), prompt, 5) for prompt in prompts]
    engine = sc.Engine(model, CONFIG)
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert list(engine.submit(prompt, max_new_tokens=5, do_sample=False).result().tokens) == tokens
    assert alone(model, prompts[1], 5) == expected[1]


class Numbered(Counted):
    """As `Counted`, in some other way."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__(inner)
        self.how = how
        if how == "buffer of a class of its own":
            self.calls = torch.zeros(()).as_subclass(OfItsOwn)
        elif how == "two buffers in one memory":
            self.register_buffer("all", torch.zeros(3))
            self.register_buffer("calls", self.all[1])
        elif how == "two attributes in one memory":
            del self.calls
            self.all = torch.zeros(3)
            self.calls = self.all[1]

    def forward(self, x: Tensor) -> Any:
        if self.how == "given other memory":
            self.calls.data = self.calls + 1
        elif self.how == "not counted":
            self.calls.data.add_(1)
        elif self.how == "resized":
            self.calls.resize_(self.calls.numel() + 1).fill_(self.calls.numel())
        else:
            self.calls.add_(1)
        found = self.all.sum() if "memory" in self.how and hasattr(self, "all") else self.calls.flatten()[-1]
        return self.inner(x) * (1 + 0.1 * found)


class OfItsOwn(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "how",
    [
        "buffer of a class of its own",
        "two buffers in one memory",
        "two attributes in one memory",
        "given other memory",
        "resized",
        "not counted",
    ],
)
def test_whatever_way_buffers_are_written_each_request_has_its_own(how: str) -> None:

    def numbered() -> Any:
        model = tiny("llama", num_hidden_layers=1, initializer_range=0.15)
        model.model.layers[0].mlp = Numbered(model.model.layers[0].mlp, how)
        return model

    model, prompts = numbered(), [[1, 5, 7], [9, 3]]
    expected = [alone(numbered(), prompt, 5) for prompt in prompts]
    for _ in range(2):
        assert sc.explain(model).verdict in ("sequential", "isolated")
        engine = sc.Engine(model, CONFIG)
        requests = [engine.submit(prompt, max_new_tokens=5, do_sample=False) for prompt in prompts]
        assert [list(request.result().tokens) for request in requests] == expected
        calls = model.model.layers[0].mlp.calls
        assert calls.shape == () and calls == 0


class SetsUp(nn.Module):
    """Changes itself when it is first called, and says so, as layers whose scale is that of data do."""

    class_flag = False

    def __init__(self, mlp: nn.Module, flag: str) -> None:
        super().__init__()
        self.mlp, self.flag = mlp, flag
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("ready", torch.zeros(1))
        self.empty_flag = None
        self.own_flag = False

    def forward(self, x: Tensor) -> Any:
        if self.flag in FLAGS_OF_MODULES:
            if not getattr(self, self.flag, False):
                self.scale.data = torch.tensor([1.0, 1.5]) * self.scale
                setattr(self, self.flag, True)
        elif not bool(self.ready.item()):
            self.scale.data[1:].mul_(1.5)
            (self.ready if self.flag == "counted buffer" else self.ready.data).fill_(1)
        return self.mlp(x) * self.scale[1]


FLAGS_OF_MODULES = ("own_flag", "class_flag", "empty_flag", "new_flag")


@pytest.mark.parametrize("flag", [*FLAGS_OF_MODULES, "buffer", "counted buffer"])
def test_a_model_that_sets_itself_up_does_so_once(flag: str) -> None:
    model = tiny("llama", num_hidden_layers=1, initializer_range=0.15)
    model.model.layers[0].mlp = part = SetsUp(model.model.layers[0].mlp, flag)
    expected = alone(copy.deepcopy(model), [1, 5, 7], 6)
    for _ in range(2):
        engine = sc.Engine(model, CONFIG)
        assert list(engine.submit([1, 5, 7], max_new_tokens=6, do_sample=False).result().tokens) == expected
        assert part.scale[1].item() == 1.5 and getattr(part, flag, part.ready)


class Behind(Untraceable):
    """What the token of the last call makes likelier is kept in a buffer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.register_buffer("last", torch.zeros(1, dtype=torch.int64), persistent=False)

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        before = self.last.clone() if input_ids.shape[1] == 1 else torch.zeros_like(self.last)
        self.last.data.copy_(input_ids[0, -1:])
        output = super().forward(input_ids=input_ids, **kwargs)
        likelier = nn.functional.one_hot((before * 7 + 1) % output.logits.shape[-1], output.logits.shape[-1])
        output.logits = output.logits + 30 * likelier
        return output


def test_what_a_trial_writes_is_seen_though_a_prompt_of_zeros_would_write_what_was_there() -> None:
    def behind() -> Any:
        torch.manual_seed(0)
        return Behind(LlamaConfig(**SIZES, eos_token_id=None, bos_token_id=None, pad_token_id=0)).eval()

    prompts = [[5, 7, 9, 11], [8, 6], [30, 31, 32]]
    expected = [alone(behind(), prompt, 5) for prompt in prompts]
    model = behind()
    engine = sc.Engine(model, CONFIG)
    requests = [engine.submit(prompt, max_new_tokens=5, do_sample=False) for prompt in prompts]
    assert [list(request.result().tokens) for request in requests] == expected and model.last.item() == 0
