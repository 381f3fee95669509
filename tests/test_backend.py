"""The padded call: exact where the graph is rewritten, the model's own elsewhere, and never silently different."""

from __future__ import annotations

import gc
import subprocess
import sys
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
    WIDTH,
    Decoder,
    additive_mask,
    by_bmm,
    by_einsum,
    by_matmul,
    by_sdpa,
    by_softcapped_einsum,
    compared_mask,
    no_mask,
    tril_mask,
    window_mask,
)
from tests.exactness import TOLERANCE, engine_error, fast, greatest, logits_of, padded_batch, padded_error
from tests.models import tiny

IDS, MASK = padded_batch(97)
REAL = MASK.bool()


def unmasked_tril(ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    return tril_mask(ids, None)


SPELLINGS: dict[str, dict[str, Any]] = {
    "einsum, triangle": {"attend": by_einsum, "mask": tril_mask},
    "einsum, comparison, grouped heads": {"attend": by_einsum, "mask": compared_mask, "kv_heads": 2},
    "matmul, added mask, one key head": {"attend": by_matmul, "mask": additive_mask, "kv_heads": 1},
    "bmm, where, no padding": {"attend": by_bmm, "mask": unmasked_tril, "kv_heads": 2},
    "sdpa, boolean mask, grouped heads": {"attend": by_sdpa, "mask": tril_mask, "kv_heads": 2},
    "sdpa, causal flag": {"attend": by_sdpa, "mask": no_mask},
    "softcap": {"attend": by_softcapped_einsum, "mask": unmasked_tril},
    "window": {"attend": by_einsum, "mask": window_mask(5), "kv_heads": 2},
}
UNPADDED = ("bmm, where, no padding", "sdpa, causal flag", "softcap")


@pytest.mark.parametrize("name", SPELLINGS)
def test_hand_written_decoder_is_exact_in_both_calls(name: str) -> None:
    """Padded left, right and both, two batch shapes; and the engine's step in chunks over scattered blocks."""
    model = Decoder(layers=1, **SPELLINGS[name])
    error, report = padded_error(model, vocabulary=VOCABULARY, masked=name not in UNPADDED)
    assert report.ok, report
    assert len(sc.selective.reports) == 1  # one graph for every shape
    assert error < TOLERANCE
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE


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


def difference(
    model: nn.Module, *calls: tuple[Tensor, dict[str, Any]], real: Tensor | None = None, **options: Any
) -> float:
    compiled, worst = fast(model, **options), 0.0
    with torch.no_grad():
        for ids, arguments in calls:
            given = logits_of(compiled(ids, **arguments)) - logits_of(model(ids, **arguments))
            rows = arguments.get("attention_mask") if real is None else real
            worst = max(worst, greatest(given if rows is None else given[rows.bool()]))
    return worst


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny("llama", num_hidden_layers=1)


HOLES = MASK.clone()
HOLES[3, 5:9] = 0
EMPTY_ROW = MASK.clone()
EMPTY_ROW[1] = 0
ALONE = torch.zeros_like(MASK)
ALONE[1, 4] = 1

REWRITTEN: dict[str, dict[str, Any]] = {
    "booleans": {"attention_mask": MASK.bool(), "use_cache": False},
    "no mask": {"use_cache": False},
    "a cache that comes back": {"attention_mask": MASK, "use_cache": True},
    "positions": {"attention_mask": MASK, "position_ids": (MASK.cumsum(1) - 1).clamp(min=0), "use_cache": False},
    "hidden states": {"attention_mask": MASK, "output_hidden_states": True, "use_cache": False},
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_arguments_of_a_rewritten_call(llama: nn.Module, name: str) -> None:
    assert difference(llama, (IDS, REWRITTEN[name])) < TOLERANCE
    assert sc.selective.reports[-1].ok, sc.selective.reports[-1]


def test_masks_of_any_zeros_and_ones(llama: nn.Module) -> None:
    """Holes, a row of padding alone, one real token in all, none: of one graph."""
    masks = (MASK, HOLES, EMPTY_ROW, ALONE, MASK)
    assert difference(llama, *((IDS, {"attention_mask": mask, "use_cache": False}) for mask in masks)) < TOLERANCE
    assert [report.ok for report in sc.selective.reports] == [True]


AS_IT_CAME: dict[str, dict[str, Any]] = {
    "a mask of floats": {"attention_mask": MASK.float(), "use_cache": False},
    "the last logits alone": {"attention_mask": torch.ones_like(MASK), "logits_to_keep": 1, "use_cache": False},
    "positions without a mask": {"position_ids": torch.arange(19)[None].expand(4, -1), "use_cache": False},
}


@pytest.mark.parametrize("name", AS_IT_CAME)
def test_arguments_of_a_call_that_runs_as_it_came(llama: nn.Module, name: str) -> None:
    real = torch.ones(4, 1, dtype=torch.bool) if name == "the last logits alone" else None
    assert difference(llama, (IDS, AS_IT_CAME[name]), real=real) < TOLERANCE
    assert not sc.selective.reports[-1].ok


@pytest.mark.slow
def test_attentions_asked_for_run_as_they_came() -> None:
    model = tiny("llama", attention="eager", num_hidden_layers=1)
    compiled = fast(model)
    with torch.no_grad():
        ours = compiled(IDS, attention_mask=MASK, output_attentions=True, use_cache=False)
        theirs = model(IDS, attention_mask=MASK, output_attentions=True, use_cache=False)
    assert greatest((ours.logits - theirs.logits)[REAL]) < TOLERANCE
    for a, b in zip(ours.attentions, theirs.attentions, strict=True):
        torch.testing.assert_close(a, b)


def test_mask_of_other_numbers_after_a_rewritten_call(llama: nn.Module) -> None:
    """The proof is for zeros and ones: a 2 may mean another segment."""
    calls = [(IDS, {"attention_mask": mask, "use_cache": False}) for mask in (MASK, MASK * 2)]
    assert difference(llama, *calls) < TOLERANCE


class Segments(nn.Module):
    """Packs several texts in a row: tokens see those with the same number in the attention mask, 0 being padding."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(layers=1, mask=self.same)

    @staticmethod
    def same(ids: Tensor, segments: Tensor) -> Tensor:
        return tril_mask(ids, None) & (segments[:, None, :, None] == segments[:, None, None, :])

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        return self.decoder(ids, segments)


def test_segments_are_not_taken_for_padding() -> None:
    model = Segments()
    compiled = fast(model)
    packed = torch.ones_like(MASK)
    packed[:, 9:] = 2
    with torch.no_grad():
        for segments in (MASK, packed):
            assert greatest((compiled(IDS, segments) - model(IDS, segments))[segments != 0]) < TOLERANCE


def test_window_over_rows_with_holes() -> None:
    model = tiny("mistral", num_hidden_layers=1)
    calls = [(IDS, {"attention_mask": mask, "use_cache": False}) for mask in (MASK, HOLES, EMPTY_ROW)]
    assert difference(model, *calls) < TOLERANCE
    assert sc.selective.reports[-1].ok


@pytest.mark.slow
def test_batches_of_one_and_tokens_of_one(llama: nn.Module) -> None:
    sizes = [(1, 19), (4, 19), (4, 1), (1, 1), (4, 4)]
    calls = [
        (IDS[:b, -s:].contiguous(), {"attention_mask": torch.ones(b, s, dtype=torch.int64), "use_cache": False})
        for b, s in sizes
    ]
    assert difference(llama, *calls) < TOLERANCE


@pytest.mark.slow
def test_all_sizes_symbolic(llama: nn.Module) -> None:
    """``dynamic=True`` makes inputs of the model's floats as well, and of two equal sizes one."""
    torch._dynamo.reset()
    sc.selective.reports.clear()
    compiled = torch.compile(llama, backend=sc.selective, dynamic=True, options={"inductor": False})
    with torch.no_grad():
        for ids, mask in ((IDS[:, :4], MASK[:, 8:12] * 0 + 1), (IDS, MASK), (IDS[:3], MASK[:3])):
            ours, theirs = (f(ids, attention_mask=mask, use_cache=False).logits for f in (compiled, llama))
            assert greatest((ours - theirs)[mask.bool()]) < TOLERANCE
    assert sc.selective.reports[-1].ok


class Scaled(nn.Module):
    """A number, of any kind, that is given with each call."""

    def __init__(self, use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.decoder, self.use = Decoder(layers=1), use

    def forward(self, ids: Tensor, mask: Tensor, number: Any) -> Tensor:
        self.decoder.mask = lambda i, m: tril_mask(i, m)
        return self.use(self.decoder(ids, mask), number)


@pytest.mark.parametrize("kind", [int, lambda n: n / 10, lambda n: torch.tensor(n * 0.1)])
def test_number_that_changes_between_calls(kind: Callable[[int], Any]) -> None:
    model = Scaled(lambda x, number: x * number)
    compiled = fast(model)
    with torch.no_grad():
        for number in (3, 4, 5, 6):
            given = kind(number)
            assert greatest((compiled(IDS, MASK, given) - model(IDS, MASK, given))[REAL]) < TOLERANCE


class Windowed(Decoder):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, window: Any) -> Tensor:  # type: ignore[override]
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        places = torch.arange(input_ids.shape[1])
        mask = tril_mask(input_ids, attention_mask) & (places[:, None] - places[None, :] < window)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


@pytest.mark.parametrize("kind", [int, lambda n: torch.tensor([n])])
def test_window_that_changes_between_calls(kind: Callable[[int], Any]) -> None:
    model = Windowed(layers=1)
    compiled = fast(model)
    with torch.no_grad():
        for window in (3, 7, 2, 4):
            given = kind(window)
            assert greatest((compiled(IDS, MASK, given) - model(IDS, MASK, given))[REAL]) < TOLERANCE


class Bigram(nn.Module):
    """A decoder without attention: the logits depend on the last token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.tokens(ids))


class Shaped(nn.Module):
    """A decoder whose logits leave it in another shape."""

    def __init__(self, decoder: nn.Module, shape: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.decoder, self.shape = decoder, shape
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.shape(self.decoder(input_ids, attention_mask))


SHAPES: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "rows merged": (lambda x: x.reshape(-1, x.shape[-1]), True),
    "tokens first": (lambda x: x.transpose(0, 1), True),
    "tokens last": (lambda x: x.transpose(1, 2), True),
    "rows merged tokens first": (lambda x: x.transpose(0, 1).reshape(-1, x.shape[-1]), False),
    "tokens and features merged": (lambda x: x.flatten(1), False),
    "requests and features merged": (lambda x: x.permute(0, 2, 1).flatten(0, 1), False),
    "half of the vocabulary": (lambda x: x[..., :50], True),
    "from the third token": (lambda x: x[:, 2:], True),
    "with the positions": (lambda x: (x, torch.arange(x.shape[1])), False),
    "with the sizes": (lambda x: (x, x.shape[1], 7), True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_of_other_shapes(name: str) -> None:
    """Without padding, so that every element is to be compared."""
    shape, rewritten = SHAPES[name]
    model = Shaped(Bigram(), shape)
    compiled = fast(model)
    with torch.no_grad():
        ours, theirs = compiled(IDS), model(IDS)
    if isinstance(theirs, tuple):
        assert [int(a) if isinstance(a, int) else a.tolist() for a in ours[1:]] == [
            int(b) if isinstance(b, int) else b.tolist() for b in theirs[1:]
        ]
        ours, theirs = ours[0], theirs[0]
    assert ours.shape == theirs.shape
    assert greatest(ours - theirs) < TOLERANCE
    assert sc.selective.reports[-1].ok == rewritten, sc.selective.reports[-1]


def test_engine_samples_from_the_vocabulary_that_the_model_returns() -> None:
    model = Shaped(Decoder(layers=1), SHAPES["half of the vocabulary"][0])
    assert engine_error(model, vocabulary=50) < TOLERANCE


def test_engine_refuses_logits_without_the_last_token() -> None:
    with pytest.raises(sc.RefusedError, match="cuts off the logits of the last token"):
        engine_error(Shaped(Bigram(), lambda x: x[:, :-1]), vocabulary=VOCABULARY)


def test_engine_serves_a_model_without_attention() -> None:
    assert engine_error(Bigram().eval(), vocabulary=VOCABULARY) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "attention"), [(torch.bfloat16, "sdpa"), (torch.bfloat16, "eager"), (torch.float16, "eager")]
)
def test_half_precision(dtype: torch.dtype, attention: str) -> None:
    """No further from the float32 model than the model's own rounding."""
    exact, model = (tiny("llama", attention=attention, num_hidden_layers=1) for _ in range(2))
    compiled = fast(model.to(dtype))
    with torch.no_grad():
        right = exact(IDS, attention_mask=MASK, use_cache=False).logits[REAL]
        ours, theirs = (f(IDS, attention_mask=MASK, use_cache=False).logits[REAL].float() for f in (compiled, model))
    assert sc.selective.reports[-1].ok, sc.selective.reports[-1]
    assert float((ours - right).norm()) <= 1.1 * float((theirs - right).norm())


def test_double_precision_runs_as_it_came() -> None:
    model = tiny("llama", num_hidden_layers=1).double()
    assert difference(model, (IDS, {"attention_mask": MASK, "use_cache": False})) < 1e-12
    assert not sc.selective.reports[-1].ok


def test_autocast_runs_as_it_came(llama: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert difference(llama, (IDS, {"attention_mask": MASK, "use_cache": False})) < TOLERANCE
    assert "autocast" in sc.selective.reports[-1].note


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_generate_on_a_compiled_model_gives_the_same_tokens() -> None:
    model = tiny("mistral")
    options: dict[str, Any] = {"attention_mask": MASK[[0, 3]], "max_new_tokens": 6, "do_sample": False}
    before = model.generate(IDS[[0, 3]], **options)
    torch._dynamo.reset()
    model.compile(backend=sc.selective, options={"inductor": False})
    assert torch.equal(model.generate(IDS[[0, 3]], **options), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inductr": False}, "must be one of inductor, implementation, got 'inductr'"),
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


@pytest.mark.slow
def test_by_name_in_a_fresh_process_with_inductor() -> None:
    script = """
import torch
from tests.decoders import Decoder, by_sdpa, tril_mask
from tests.exactness import padded_batch
ids, mask = padded_batch(97)
model = Decoder(attend=by_sdpa, mask=tril_mask, kv_heads=2)
fast = torch.compile(model, backend="selective")
with torch.no_grad():
    for rows in (4, 3):
        real = mask[:rows].bool()
        assert ((fast(ids[:rows], mask[:rows]) - model(ids[:rows], mask[:rows]))[real]).abs().max() < 1e-4
import selective_compile
assert [report.ok for report in selective_compile.selective.reports] == [True]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600)


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
    assert any("none of the graph's inputs holds tokens" in str(report) for report in sc.selective.reports)


def test_scores_rounded_to_a_narrower_type_are_not_rewritten_silently() -> None:
    """The rewrite would leave the rounding out: other logits than the model's, by more than the tolerance."""

    def rounded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        scores = (q @ k.transpose(-1, -2) * 0.35).masked_fill(~mask, -1e30).half().float()
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    error, _ = padded_error(Decoder(layers=1, attend=rounded), vocabulary=VOCABULARY)
    assert error < TOLERANCE


def chunk_mask(ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    chunks = torch.arange(ids.shape[1]) // 5
    return tril_mask(ids, attention_mask) & (chunks[:, None] == chunks)


def bias_by_distance(ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    places, slopes = torch.arange(ids.shape[1]), torch.tensor([1.0, 0.5, 0.25, 0.125])
    return additive_mask(ids, attention_mask) - slopes[:, None, None] * (places[:, None] - places)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


COUNTING_COLUMNS: dict[str, Any] = {
    "window": lambda: Decoder(layers=1, mask=window_mask(5)),
    "chunks": lambda: Decoder(layers=1, mask=chunk_mask),
    "bias by distance": lambda: Decoder(layers=1, attend=by_matmul, mask=bias_by_distance),
    "convolution": lambda: Decoder(layers=1, mix=Convolution()),
}


@pytest.mark.parametrize("make", COUNTING_COLUMNS.values(), ids=COUNTING_COLUMNS)
def test_what_counts_columns_counts_those_of_padding_too(make: Callable[[], Decoder]) -> None:
    model = make()
    error, report = padded_error(model, vocabulary=VOCABULARY)
    assert report.ok and error < TOLERANCE
    compiled = fast(model)
    holes = torch.ones_like(IDS)
    holes[0, 4], holes[1, 2:4], holes[2, 10], holes[3, :5] = 0, 0, 0, 0
    for mask in (holes, torch.ones_like(IDS)):
        with torch.no_grad():
            difference = compiled(IDS, mask) - model(IDS, mask)
        assert greatest(difference[mask.bool()]) < TOLERANCE
