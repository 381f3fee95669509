"""What models make of whole rows at their ends: without padding where it reads none, else the model's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

import selective_compile as sc
from selective_compile import padding_reads
from tests.decoders import VOCABULARY, Decoder
from tests.exactness import TOLERANCE, fast, greatest, padded_batch
from tests.models import COMMON, tiny
from tests.padded_calls import IDS, MASK, REAL

PAD = 0
End = Callable[[Tensor, Tensor, Tensor], Any]


class Ends(Decoder):
    """What ``end`` makes of logits, ids and mask."""

    def __init__(self, end: End) -> None:
        super().__init__(layers=1)
        self.end = end

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:  # type: ignore[override]
        return self.end(super().forward(input_ids, attention_mask), input_ids, attention_mask)


def loss(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """In front of a row padding has to say what its first token is."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 1:].masked_fill_(mask[:, :-1] == 0, -100)
    labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss_and_logits(logits: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return loss(logits, ids, mask), logits


def log_probabilities(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """[B], as a reference model's in preference tuning."""
    found = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return (found * mask[:, 1:] * mask[:, :-1]).sum(1)


def last(mask: Tensor) -> Tensor:
    return (mask * torch.arange(mask.shape[1])).argmax(1)


def last_by_index(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    return logits[torch.arange(logits.shape[0]), last(mask)]


def last_by_gather(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    return logits[..., 0].gather(1, last(mask)[:, None])


def last_by_one_hot(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    is_last = last(mask)[:, None] == torch.arange(mask.shape[1])
    return (is_last[..., None].to(logits.dtype) * logits).sum(1)


def mean(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    weight = mask[..., None].to(logits.dtype)
    return (logits * weight).sum(1) / weight.sum(1).clamp(min=1e-9)


def greatest_of_row(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    return logits.masked_fill(mask[..., None] == 0, -1e9).max(1).values


def pooled_by_scores(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    weights = logits[..., 0].masked_fill(mask == 0, float("-inf")).softmax(1)
    return (weights[..., None] * logits).sum(1)


def of_all_rows(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    return mean(logits, ids, mask).softmax(0)


def contrastive(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Each row against all others, as embeddings are trained."""
    rows = F.normalize(mean(logits, ids, mask), dim=-1)
    return F.cross_entropy(rows @ rows.T * 20, torch.arange(rows.shape[0], device="cpu"))


def preference(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Of the first half of the rows over the second, as in preference tuning."""
    found = log_probabilities(logits, ids, mask)
    half = found.shape[0] // 2
    return -F.logsigmoid(0.1 * (found[:half] - found[half : 2 * half])).mean()


def directions(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Of rows of zeros it is not a number, and not hidden by a weight of 0."""
    rows = logits[:, 1:]
    return (rows / rows.norm(dim=-1, keepdim=True) * mask[:, 1:, None]).sum(1)


READ_NO_PADDING = [
    loss,
    loss_and_logits,
    log_probabilities,
    last_by_index,
    last_by_gather,
    last_by_one_hot,
    mean,
    greatest_of_row,
    pooled_by_scores,
    of_all_rows,
    contrastive,
    preference,
    directions,
]


def labels_at_padding(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def last_column(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    return logits.flip(1)[:, 0]


def mean_of_all(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    return logits.mean(1)


def greatest_of_all(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    return logits[..., 0].amax(1)


def bells(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Of large numbers nothing is left."""
    return (-(logits**2)).exp().sum(1)


def saturated(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    return logits.clamp(-0.1, 0.1).sum(1)


def waves(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Of large numbers nothing is left, nor of 0; the columns that are taken stand in front of all that."""
    rows = logits[:, 1:]
    return (rows * (-(rows**2)).exp()).sum(1)


READ_PADDING = [labels_at_padding, last_column, mean_of_all, greatest_of_all, bells, saturated, waves]


def over_squares(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """In float16 the square of a large number is infinite."""
    rows = logits[:, 1:]
    return (rows * (rows.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).sum(1)


def counted(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """A comparison hides which number it has read."""
    return (logits > 1e5).sum(1)


def chosen(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    return ids.gather(1, logits[..., 0].argmax(1, keepdim=True))


def drawn(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    return mean(logits, ids, mask) + torch.rand(VOCABULARY)


NOT_TAKEN_OFF = [counted, chosen, drawn]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call, whether it had its result without the model's own padding."""
    found: list[bool] = []
    run = padding_reads.SummaryProgram.__call__

    def spied(*arguments: Any, **others: Any) -> Any:
        result = run(*arguments, **others)
        found.append(result is not None)
        return result

    monkeypatch.setattr(padding_reads.SummaryProgram, "__call__", spied)
    return found


def error_of(compiled: Any, model: Any, *arguments: Any, **others: Any) -> float:
    """Of all results, and of rows of tokens those that are none of padding."""
    with torch.no_grad():
        torch.manual_seed(3)
        ours = compiled(*arguments, **others)
        torch.manual_seed(3)
        theirs = model(*arguments, **others)
    pairs = zip(tensors(ours), tensors(theirs), strict=True)
    real = (arguments[1] if len(arguments) > 1 else others["attention_mask"]).bool()
    return max(greatest((a - b)[real] if a.shape[:2] == real.shape else a - b) for a, b in pairs)


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [value for value in (result if isinstance(result, tuple) else result.values()) if isinstance(value, Tensor)]


@pytest.mark.parametrize("end", READ_NO_PADDING)
def test_what_reads_no_padding_is_computed_without(end: End, tried: list[bool]) -> None:
    model = Ends(end)
    compiled = fast(model)
    for shape in ({}, {"batch": 5, "length": 27}):
        assert error_of(compiled, model, *padded_batch(VOCABULARY, **shape)) < TOLERANCE
    report = sc.selective.reports[-1]
    assert report.ok and "at the end, which are of whole rows" in report.note
    assert tried == [True, True]


@pytest.mark.parametrize("end", READ_PADDING)
def test_what_reads_padding_is_the_models_own(end: End, tried: list[bool]) -> None:
    model = Ends(end)
    compiled = fast(model)
    assert error_of(compiled, model, IDS % VOCABULARY, MASK) < TOLERANCE
    assert error_of(compiled, model, IDS % VOCABULARY, torch.ones_like(MASK)) < TOLERANCE
    assert sc.selective.reports[-1].ok
    assert tried == [False, True]


def test_large_numbers_that_overflow_hide_no_read(tried: list[bool]) -> None:
    model = Ends(over_squares).half()
    assert error_of(fast(model), model, IDS % VOCABULARY, MASK) == 0
    assert tried == [False]


@pytest.mark.parametrize("end", NOT_TAKEN_OFF)
def test_what_could_hide_what_it_reads_runs_as_it_came(end: End, tried: list[bool]) -> None:
    model = Ends(end)
    assert error_of(fast(model), model, IDS % VOCABULARY, MASK) < TOLERANCE
    assert not sc.selective.reports[-1].ok and not tried


def test_random_numbers_of_the_caller_stay_the_same() -> None:
    compiled = fast(Ends(mean))
    with torch.no_grad():
        torch.manual_seed(1)
        compiled(IDS % VOCABULARY, MASK)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)


def test_what_reads_padding_again_and_again_is_not_tried_any_more(
    tried: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    model = Ends(mean_of_all)
    compiled = fast(model)
    with caplog.at_level(logging.WARNING, "selective_compile.padding_reads"):
        for _ in range(padding_reads.IN_A_ROW + 2):
            assert error_of(compiled, model, IDS % VOCABULARY, MASK) < TOLERANCE
    assert tried == [False] * padding_reads.IN_A_ROW
    assert len([each for each in caplog.records if each.name == "selective_compile.padding_reads"]) == 1


def test_calls_without_padding_tell_nothing_of_what_is_read(tried: list[bool]) -> None:
    compiled = fast(Ends(mean_of_all))
    with torch.no_grad():
        for _ in range(padding_reads.IN_A_ROW + 1):
            compiled(IDS % VOCABULARY, MASK)
            compiled(IDS % VOCABULARY, torch.ones_like(MASK))
    assert tried == [False, True] * (padding_reads.IN_A_ROW - 1) + [False]


def test_what_was_given_up_runs_through_inductor() -> None:
    model = Ends(mean_of_all)
    compiled = fast(model, inductor=True)
    for _ in range(padding_reads.IN_A_ROW + 1):
        assert error_of(compiled, model, IDS % VOCABULARY, MASK) < TOLERANCE


@pytest.mark.parametrize("shape", [(3, 5), (2, padding_reads.DRAWN + 1), (2, 2, padding_reads.DRAWN - 1), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_in_padding(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """All in their bounds, and rows that are not one another's."""
    for fill, (least, most) in zip(padding_reads.fills(), padding_reads.NUMBERS, strict=True):
        filled = fill(torch.full(shape, torch.nan, dtype=dtype))
        assert filled.shape == shape and bool(((filled >= least) & (filled <= most)).all())
        assert not filled.numel() or not torch.equal(filled[0], filled[1])


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_scores_of_sequences(kind: str, tried: list[bool]) -> None:
    config = AutoConfig.for_model(kind, **{**COMMON, **SIZES.get(kind, {})}, num_labels=3, pad_token_id=PAD)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    compiled = fast(model)
    ids = (IDS + 1).masked_fill(~REAL, PAD)
    assert error_of(compiled, model, input_ids=ids, attention_mask=MASK, use_cache=False) < TOLERANCE
    assert sc.selective.reports[-1].ok and tried == [True]


SIZES: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 16, "sliding_window": 8},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
}


@pytest.mark.parametrize(("labelled", "side", "without"), [(-100, 1, True), (PAD, 1, False), (-100, 0, False)])
def test_loss_of_labels(labelled: int, side: int, without: bool, tried: list[bool]) -> None:
    """In front of a row, padding says what its first token is."""
    model = tiny("llama", num_hidden_layers=1)
    mask = MASK[[1, 3]] if side else MASK[[0, 3]]
    ids = IDS[: len(mask)]
    labels = ids.masked_fill(mask == 0, labelled)
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}
    assert error_of(fast(model), model, **given) < TOLERANCE
    assert tried == [without]
