"""The padded call: exact where the graph is rewritten, the model's own elsewhere, and never silently different."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import selective_compile as sc
from tests.decoders import (
    VOCABULARY,
    Decoder,
    by_sdpa,
    tril_mask,
)
from tests.exactness import TOLERANCE, fast, greatest, padded_error
from tests.models import tiny
from tests.padded_calls import IDS, MASK, REAL


def swapped_rows(x: Tensor) -> Tensor:
    return x.flip(0)


def less_mean_of_requests(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True)


def by_length(x: Tensor) -> Tensor:
    return x * x.shape[1] ** -0.5


def long_is_doubled(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] > 20 else x


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.calls


@pytest.mark.parametrize("mix", [swapped_rows, less_mean_of_requests, by_length])
def test_refused_model_runs_as_it_came(mix: Callable[[Tensor], Tensor]) -> None:
    error, report = padded_error(Decoder(layers=1, mix=mix), vocabulary=VOCABULARY)
    assert not report.ok and report.refusals
    assert error < TOLERANCE


def test_branch_on_the_length_is_taken_as_the_model_takes_it() -> None:
    """Of a padded call, Dynamo guards the length: each branch has its graph."""
    error, report = padded_error(Decoder(layers=1, mix=long_is_doubled), vocabulary=VOCABULARY)
    assert report.ok and len(sc.selective.reports) == 2
    assert error < TOLERANCE


def test_model_with_a_break_in_its_graph_runs_as_it_came() -> None:
    """Where the sizes of the first call are made symbolic, Dynamo traces again what it had broken off."""

    def mixed_then_broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + x.roll(1, 1)

    class ReadsSizesFirst(Decoder):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            shape = input_ids.size()
            return super().forward(input_ids.view(-1, shape[-1]), attention_mask)

    error, report = padded_error(ReadsSizesFirst(mix=mixed_then_broken), vocabulary=VOCABULARY)
    assert error < TOLERANCE and not report.ok


def test_buffer_that_counts_calls_counts_them_once() -> None:
    counting = Counting()
    compiled = fast(Decoder(layers=1, mix=counting))
    with torch.no_grad():
        compiled(IDS, MASK)
        compiled(IDS, MASK)
    assert float(counting.calls) == 2
    assert not sc.selective.reports[-1].ok


def test_gradients_and_training_run_as_they_came() -> None:
    model = tiny("llama", num_hidden_layers=1)
    compiled = fast(model)
    compiled(IDS, attention_mask=MASK, labels=IDS, use_cache=False).loss.backward()
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    assert "gradients are recorded" in sc.selective.reports[-1].note
    model.zero_grad()
    model(IDS, attention_mask=MASK, labels=IDS, use_cache=False).loss.backward()
    for a, parameter in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(a, parameter.grad)


def test_dropout_in_training_mode_runs_as_it_came() -> None:
    model = Decoder(layers=1, mix=nn.Dropout(0.5)).train()
    with torch.no_grad():
        torch.manual_seed(1)
        ours = fast(model)(IDS, MASK)
        torch.manual_seed(1)
        assert greatest((ours - model(IDS, MASK))[REAL]) < TOLERANCE
    assert any("draws random numbers" in refusal.reason for refusal in sc.selective.reports[-1].refusals)


def test_weight_updates_are_seen() -> None:
    model = tiny("llama", num_hidden_layers=1)
    compiled = fast(model)

    def error() -> float:
        ours, theirs = (f(IDS, attention_mask=MASK, use_cache=False).logits for f in (compiled, model))
        return greatest((ours - theirs)[REAL])

    layer = model.model.layers[0].mlp.up_proj
    with torch.no_grad():
        assert error() < TOLERANCE
        layer.weight.mul_(1.5)
        assert error() < TOLERANCE
        layer.weight = nn.Parameter(torch.randn_like(layer.weight))
        assert error() < TOLERANCE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inductr": False}, "must be one of inductor, implementation, keep_traces, got 'inductr'"),
        ({"inductor": 1}, "inductor must be True or False, got 1"),
        ({"implementation": "fast"}, "implementation must be one of"),
    ],
)
def test_wrong_option_is_an_error(options: dict[str, Any], message: str) -> None:
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match=message) as raised:
        torch.compile(Decoder(layers=1), backend=sc.selective, options=options)(IDS)
    assert isinstance(raised.value.inner_exception, ValueError)


def test_last_graph_that_dynamo_makes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        compiled = fast(Decoder(layers=1))
        compiled(IDS)
        assert "last of the" not in caplog.text
        compiled(IDS, MASK)
        assert "this is the last of the 2 graphs" in caplog.text


def test_padding_costs_nothing() -> None:
    """The compiled graph sees the real tokens, in the order of the batch, and no others."""
    compiled = fast(Decoder(layers=1))
    with torch.no_grad():
        compiled(IDS, MASK)
        with torch.profiler.profile(record_shapes=True) as profile:
            compiled(IDS, MASK)
    linear = [event for event in profile.events() if event.name.endswith("::linear")]
    assert linear and {tuple(event.input_shapes[0][:-1]) for event in linear} == {(1, int(MASK.sum()))}


def test_model_is_let_go() -> None:
    model = Decoder(layers=1)
    compiled = fast(model)
    with torch.no_grad():
        compiled(IDS, MASK)
    gone = weakref.ref(model.head.weight)
    del model, compiled
    torch._dynamo.reset()
    sc.selective.reports.clear()
    gc.collect()
    assert gone() is None


def test_by_name_with_inductor() -> None:
    torch._dynamo.reset()
    sc.selective.reports.clear()
    model = Decoder(attend=by_sdpa, mask=tril_mask, kv_heads=2)
    compiled = torch.compile(model, backend="selective")
    with torch.no_grad():
        for rows in (4, 3):
            ours, theirs = (f(IDS[:rows], MASK[:rows]) for f in (compiled, model))
            assert greatest((ours - theirs)[REAL[:rows]]) < TOLERANCE
    assert [report.ok for report in sc.selective.reports] == [True]


class Broken(nn.Module):
    """Dynamo breaks it into graphs, the second of which has no input of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(layers=1)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.decoder(ids, attention_mask)
        factor = self.scale.exp().sum()
        torch._dynamo.graph_break()
        factor = factor * 2 + self.scale.sin().sum()
        torch._dynamo.graph_break()
        return logits * factor


def test_graphs_of_a_broken_model_run_correctly() -> None:
    error, _ = padded_error(Broken(), vocabulary=VOCABULARY)
    assert error < TOLERANCE
    reports = [str(report) for report in sc.selective.reports]
    assert sum("Dynamo breaks the graph behind it" in report for report in reports) >= 2


class Pooled(nn.Module):
    """What Dynamo has not seen when it hands over the graph reads rows of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(layers=1)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.decoder(ids, attention_mask)
        torch._dynamo.graph_break()
        return logits[:, -1] + logits.mean(1)


def test_what_follows_a_break_finds_rows_of_padding() -> None:
    model = Pooled().eval()
    compiled = fast(model)
    with torch.no_grad():
        assert greatest(compiled(IDS, MASK) - model(IDS, MASK)) < TOLERANCE


def test_a_mask_that_vmap_made_runs_as_it_came() -> None:
    model, eager = (tiny("llama", attention=each, num_hidden_layers=1) for each in ("flex_attention", "eager"))
    compiled = fast(model)
    with torch.no_grad():
        ours, theirs = (f(IDS, attention_mask=MASK, use_cache=False).logits for f in (compiled, eager))
    assert greatest((ours - theirs)[REAL]) < TOLERANCE


def test_gradients_that_the_graph_turns_on_are_recorded() -> None:
    model = Decoder(layers=1).eval()

    def learning(ids: Tensor, mask: Tensor) -> Tensor:
        with torch.enable_grad():
            return model(ids, mask)

    with torch.no_grad():
        assert fast(learning)(IDS, MASK).requires_grad
    assert "gradients are recorded" in str(sc.selective.reports[-1])


def test_sizes_of_which_nothing_is_known_run_as_they_came() -> None:
    model = tiny("llama", num_hidden_layers=1)
    ids, mask = IDS.clone(), MASK.clone()
    for each, dim in ((ids, 0), (ids, 1), (mask, 0), (mask, 1)):
        torch._dynamo.decorators.mark_unbacked(each, dim)
    with torch.no_grad():
        ours = fast(model)(ids, attention_mask=mask, use_cache=False).logits
        theirs = model(IDS, attention_mask=MASK, use_cache=False).logits
    assert greatest((ours - theirs)[REAL]) < TOLERANCE


def test_options_that_are_no_dictionary_are_refused() -> None:
    broken: Any = [("inductor", False)]
    with pytest.raises((ValueError, BackendCompilerFailed), match="options must be a dictionary or None"):
        torch.compile(tiny("gpt2"), backend=sc.selective, options=broken)(IDS)
