"""What a forward leaves in a model: each request's is its own, and the model is left as it was, whatever kind it is."""

from __future__ import annotations

import collections
import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import selective_compile as sc
from selective_compile import module_state
from selective_compile.backend import report_of
from selective_compile.module_state import deep_copy, own_attributes, same_buffers, unchanged, watched_objects
from selective_compile.sequential_program import SequentialProgram
from tests.models import tiny

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
CONFIG = sc.EngineConfig(compile=False, token_budget=24, block_size=8, max_kv_tokens=8 * 20)
Pair = collections.namedtuple("Pair", ["last", "count"])

# How the last token's input is kept, and read again.
KINDS: dict[str, Any] = {
    "tensor": (lambda x: x, lambda kept: kept),
    "tuple": (lambda x: (x, 1), lambda kept: kept[0]),
    "named tuple": (lambda x: Pair(x, 1), lambda kept: kept.last),
    "nested": (lambda x: {"layers": [(x,)]}, lambda kept: kept["layers"][0][0]),
    "deque": (lambda x: collections.deque([x], maxlen=1), lambda kept: kept[-1]),
    "object": (lambda x: SimpleNamespace(last=x), lambda kept: kept.last),
}
# Kept where it is from the start on: written in place.
IN_PLACE: dict[str, Any] = {
    "dict": (dict, lambda kept, x: kept.update(last=x), lambda kept: kept["last"]),
    "list": (lambda: [None], lambda kept, x: kept.__setitem__(0, x), lambda kept: kept[0]),
    "tensor in place": (lambda: torch.zeros(1, 1, 32), lambda kept, x: kept.copy_(x), lambda kept: kept),
    "tensor in a list": (lambda: [torch.zeros(1, 1, 32)], lambda kept, x: kept[0].copy_(x), lambda kept: kept[0]),
}


class Shift(nn.Module):
    """To each token's input it adds that of the token before, which it keeps from call to call in its own way."""

    def __init__(self, mlp: nn.Module, kind: str) -> None:
        super().__init__()
        self.mlp, self.kind, self.seen = mlp, kind, 0
        if kind == "buffer in place":
            self.register_buffer("past", torch.zeros(1, 1, 32), persistent=False)
        elif kind == "buffer":
            self.register_buffer("past", None, persistent=False)
        else:
            self.past: Any = IN_PLACE[kind][0]() if kind in IN_PLACE else None

    def forward(self, x: Tensor) -> Tensor:
        prompt = x.shape[1] > 1 or not self.seen
        last = torch.zeros_like(x[:, :1]) if prompt else self.kept()
        self.seen = x.shape[1] + (0 if prompt else self.seen)
        before = torch.cat([last, x[:, :-1]], dim=1)
        self.keep(x[:, -1:].detach().clone())
        return self.mlp(x + before)

    def kept(self) -> Tensor:
        if self.kind in IN_PLACE:
            return IN_PLACE[self.kind][2](self.past).clone()
        return self.past.clone() if "buffer" in self.kind else KINDS[self.kind][1](self.past)

    def keep(self, new: Tensor) -> None:
        if self.kind in IN_PLACE:
            IN_PLACE[self.kind][1](self.past, new)
        elif self.kind == "buffer in place":
            self.past.copy_(new)
        else:
            self.past = new if self.kind == "buffer" else KINDS[self.kind][0](new)


class Untraceable(LlamaForCausalLM):
    """Whole, one request after another: what Dynamo cannot trace is in the model's own forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert float(self.lm_head.weight.sum()) < 1e9
        return super().forward(*args, **kwargs)


def model_with(kind: str) -> Any:
    torch.manual_seed(0)
    model = Untraceable(LlamaConfig(**SIZES, eos_token_id=None, bos_token_id=None, pad_token_id=0)).eval()
    for layer in model.model.layers:
        layer.mlp = Shift(layer.mlp, kind)
    return model


def alone(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    return model.generate(ids, max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", [*KINDS, *IN_PLACE, "buffer", "buffer in place"])
def test_requests_that_advance_together_have_each_its_own_state(kind: str) -> None:
    prompts = [[5, 7, 9, 11], [8, 6], [30, 31, 32, 33, 34, 35, 36]]
    expected = [alone(model_with(kind), prompt, 6) for prompt in prompts]
    model = model_with(kind)
    before = snapshot(model)
    engine = sc.Engine(model, CONFIG, program=SequentialProgram(model, ()))
    requests = [engine.submit(prompt, max_new_tokens=6, do_sample=False) for prompt in prompts]
    assert [list(request.result().tokens) for request in requests] == expected
    assert_same(snapshot(model), before)


@pytest.mark.parametrize("kind", ["object", "list"])
def test_beams_that_part_have_each_its_own_state(kind: str) -> None:
    """However it is kept: `generate` itself cannot tell, as its beams would share it."""

    def beams(kind: str) -> Any:
        model = model_with(kind)
        engine = sc.Engine(model, CONFIG, program=SequentialProgram(model, ()))
        return engine.submit([5, 7, 9, 11], max_new_tokens=6, num_beams=3, do_sample=False).result().tokens

    assert beams(kind) == beams("tensor")


def snapshot(model: nn.Module) -> list[tuple[str, Any]]:
    names = [(f"{path}.{name}", value) for path, part in model.named_modules() for name, value in vars(part).items()]
    named = [(name, value) for name, value in names if not name.rpartition(".")[2].startswith("_")]
    return named + [(name, (buffer, buffer.clone())) for name, buffer in model.named_buffers()]


def assert_same(now: list[tuple[str, Any]], before: list[tuple[str, Any]]) -> None:
    assert [name for name, _ in now] == [name for name, _ in before]
    for (name, value), (_, own) in zip(now, before, strict=True):
        if isinstance(own, tuple) and own and isinstance(own[0], Tensor):
            assert value[0] is own[0] and torch.equal(value[1], own[1]), name
        else:
            assert value is own, name


class Box:
    def __init__(self) -> None:
        self.last = torch.zeros(1, 1, 32)
        self.count = 0


class Boxed(Shift):
    """Its state is in an object that was there before."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__(mlp, "tensor")
        self.box = {"first": Box()}

    def kept(self) -> Tensor:
        return self.box["first"].last

    def keep(self, new: Tensor) -> None:
        self.box["first"].last = new


def test_state_in_an_object_of_the_model_is_refused_by_name() -> None:
    model = model_with("tensor")
    model.model.layers[1].mlp = Boxed(model.model.layers[1].mlp.mlp)
    with pytest.raises(
        sc.RefusedError, match=r"state in an object \(box\) in model\.layers\.1\.mlp: a run changes"
    ) as e:
        sc.Engine(model, CONFIG)
    assert len(e.value.refusals) == 2, "with what could not be proved"
    report = sc.explain(model)
    assert report.verdict == "refused" and "state in an object (box)" in str(report)


class AsksForValues(LlamaForCausalLM):
    """So that it cannot be traced, and is run."""

    def forward(self, input_ids: Any = None, **arguments: Any) -> Any:
        if input_ids.sum() < 0:
            raise AssertionError("no ids")
        return super().forward(input_ids, **arguments)


@pytest.mark.parametrize(("kind", "verdict"), [(LlamaForCausalLM, "ragged"), (AsksForValues, "sequential")])
def test_explaining_leaves_a_model_as_it_was(kind: type[LlamaForCausalLM], verdict: str) -> None:
    """A rotary embedding that grows with what it has seen: an int that a run makes a tensor."""
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, max_position_embeddings=32, rope_parameters=scaling, pad_token_id=0)
    model = kind(config).eval()
    prompt = list(range(1, 41))
    expected = alone(model, prompt, 3)
    torch.manual_seed(0)
    model = kind(config).eval()
    before = snapshot(model)
    assert sc.explain(model).verdict == verdict
    assert_same(snapshot(model), before)
    assert model.model.rotary_emb.max_seq_len_cached == 32
    assert alone(model, prompt, 3) == expected


# Values


scalars = st.none() | st.booleans() | st.integers(0, 3) | st.text(max_size=2) | st.just("tensor")
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.lists(inner, max_size=3).map(collections.deque)
    ),
    max_leaves=6,
)


def made(value: Any) -> Any:
    """With a tensor in place of each word "tensor"."""
    if isinstance(value, dict):
        return {key: made(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value)(made(item) for item in value)
    return torch.zeros(2) if value == "tensor" else value


def spoil(value: Any) -> None:
    """Change all that can be changed in place."""
    if isinstance(value, Tensor):
        value.add_(1)
    elif isinstance(value, (list, collections.deque, dict, tuple)):
        for item in list(value.values() if isinstance(value, dict) else value):
            spoil(item)
        if isinstance(value, dict):
            value["new"] = 1
        elif not isinstance(value, tuple):
            value.append(1)


def shown(value: Any) -> str:
    return repr(value)


@settings(max_examples=60, deadline=None)
@given(first=values, second=values)
def test_nothing_that_a_run_does_to_attributes_is_seen_outside_of_it(first: Any, second: Any) -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    module.kept, module[0].other = made(first), made(second)  # type: ignore[assignment]
    before, objects = shown((module.kept, module[0].other)), (module.kept, module[0].other)
    with own_attributes(module, {}) as left:
        spoil(module.kept)
        module[0].other = module.kept
        module.new = 3  # type: ignore[assignment]
        inside = shown((module.kept, module[0].other))
    assert shown((module.kept, module[0].other)) == before and not hasattr(module, "new")
    assert module.kept is objects[0] and module[0].other is objects[1]
    kept = deep_copy(module, left)
    for state in (left, kept):
        with own_attributes(module, state):
            assert shown((module.kept, module[0].other)) == inside and module.new == 3
            spoil(module.kept)
        assert shown((module.kept, module[0].other)) == before


def test_attribute_that_a_run_takes_out_is_out_for_its_request_alone() -> None:
    module = nn.Linear(1, 1)
    module.flag, module.other = True, 1  # type: ignore[assignment]
    names = list(vars(module))
    with own_attributes(module, {}) as left:
        del module.flag
    assert module.flag and list(vars(module)) == names
    with own_attributes(module, left):
        assert not hasattr(module, "flag")
    with own_attributes(module, deep_copy(module, left)):
        assert not hasattr(module, "flag")


@pytest.mark.parametrize("name", ["attributes", "stays"])
def test_an_interrupt_while_it_looks_at_what_a_run_has_left_leaves_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Linear(1, 1)
    module.flag = 1  # type: ignore[assignment]
    function, calls = getattr(module_state, name), itertools.count()

    def interrupted(*given: Any) -> Any:
        if next(calls) == (name == "attributes"):
            raise KeyboardInterrupt
        return function(*given)

    monkeypatch.setattr(module_state, name, interrupted)
    with pytest.raises(KeyboardInterrupt), own_attributes(module, {}):
        module.flag = 7  # type: ignore[assignment]
    assert module.flag == 1


def test_weights_in_containers_stay_the_weights() -> None:
    module = nn.LSTM(2, 2)
    module.table = {"weight": module.weight_hh_l0, "child": nn.Linear(1, 1)}  # type: ignore[assignment]
    table = module.table
    with own_attributes(module, {}) as left:
        assert module.table is not table and module.table["weight"] is module.weight_hh_l0
        assert module.table["child"] is table["child"]
        module(torch.zeros(1, 1, 2))
    copied = deep_copy(module, left)[(module, "attribute", "table")]
    assert copied["weight"] is module.weight_hh_l0


def test_two_names_of_one_tensor_stay_two_names_of_one() -> None:
    module = nn.Linear(1, 1)
    module.a = torch.zeros(1)
    module.b = [module.a]  # type: ignore[assignment]
    with own_attributes(module, {}):
        assert module.a is module.b[0]
        module.a.add_(1)
        assert module.b[0].item() == 1
    assert module.a.item() == 0


class Rescaling(nn.Linear):
    """As RWKV: weights are changed by a first run, and a flag says so."""

    done = False

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.done = False
        self.past: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            self.weight.div_(2)
            self.done = True
        self.past = x
        return super().forward(x)


def test_a_model_that_a_first_run_sets_up_is_set_up_once() -> None:
    module = Rescaling()
    weight = module.weight.item()
    with torch.no_grad():
        for _ in range(3):
            with own_attributes(module, {}):
                module(torch.zeros(1, 1))
    assert module.weight.item() == weight / 2 and module.done and module.past is None


class Folded(nn.Linear):
    """As PEFT's: the first run takes out of the weights what a list names."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.folded = ["one", "two"]
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        while self.folded:
            self.folded.pop()
            self.weight.data -= 1.0
        self.seen.append(x)
        return super().forward(x)


def test_what_a_first_run_takes_out_of_the_weights_is_taken_out_once() -> None:
    module = Folded()
    weight = module.weight.item()
    for _ in range(3):
        with torch.no_grad(), unchanged(module):
            module(torch.zeros(1, 1))
    assert module.weight.item() == pytest.approx(weight - 2) and module.folded == [] and module.seen == []


def test_buffers_written_in_place_are_named_and_put_back() -> None:
    model = nn.BatchNorm1d(2)
    values, version = model.running_mean.clone(), model.num_batches_tracked._version  # type: ignore[union-attr,operator]
    with unchanged(model) as written:
        model.running_mean.add_(1)  # type: ignore[union-attr]
    assert written == {(model, "buffer", "running_mean")}
    assert torch.equal(model.running_mean, values) and model.num_batches_tracked._version == version  # type: ignore


class Counted(nn.Module):
    """What a layer gives depends on how often it was called, by a buffer that each call writes in place."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls.add_(1)
        return self.inner(x) * (1 + 0.1 * self.calls)


def test_making_an_engine_leaves_buffers_as_they_were() -> None:
    model = tiny("llama", num_hidden_layers=1, initializer_range=0.15)
    model.model.layers[0].mlp = counted = Counted(model.model.layers[0].mlp)
    prompt = [1, 5, 7]
    expected = alone(copy.deepcopy(model), prompt, 4)
    assert sc.explain(model).verdict == "sequential" and counted.calls == 0
    engine = sc.Engine(model, CONFIG)
    assert counted.calls == 0
    assert list(engine.submit(prompt, max_new_tokens=4, do_sample=False).result().tokens) == expected
    assert counted.calls == 0


def test_a_model_may_be_explained_while_engines_of_their_own_threads_run_it() -> None:
    model = tiny("llama", num_hidden_layers=1, initializer_range=0.15)
    model.model.layers[0].mlp = counted = Counted(model.model.layers[0].mlp)
    prompts, new = [[1, 5, 7], [9, 3], [4, 4, 8]], 25
    expected = [alone(copy.deepcopy(model), prompt, new) for prompt in prompts]
    first, second = sc.Engine(model, CONFIG), sc.Engine(model, CONFIG)
    with first.running(), second.running():
        for _ in range(3):
            every = [
                engine.submit(p, max_new_tokens=new, do_sample=False) for engine in (first, second) for p in prompts
            ]
            assert sc.explain(model).verdict == "sequential"
            assert [list(request.result(timeout=60).tokens) for request in every] == expected * 2
    assert counted.calls == 0


def test_a_buffer_that_says_that_weights_are_set_up_goes_on_to() -> None:
    module = Rescaling()
    module.register_buffer("said", torch.zeros(()))
    with torch.no_grad(), same_buffers(module):
        module(torch.zeros(1, 1))
        module.said.add_(1)
    assert module.said == 1


def test_objects_that_change_are_named() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    module[0].box, module[0].other = [Box()], Box()  # type: ignore[assignment]
    box = module[0].box[0]  # type: ignore[index]
    for change in (lambda: setattr(box, "count", 1), lambda: box.last.add_(1), lambda: setattr(box, "new", [])):
        with watched_objects(module) as changed:
            change()
        assert changed == {("0", "box")}
    with watched_objects(module) as changed:
        pass
    assert not changed


def test_report_of_a_program_says_sequential() -> None:
    model = model_with("tuple")
    assert report_of(SequentialProgram(model, ()), model).verdict == "sequential"
