"""The padded call with other masks, arguments, sizes and numbers than those it was compiled with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import selective_compile as sc
from tests.decoders import (
    Decoder,
    tril_mask,
)
from tests.exactness import TOLERANCE, fast, greatest
from tests.models import tiny
from tests.padded_calls import ALONE, EMPTY_ROW, HOLES, IDS, MASK, REAL, difference


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny("llama", num_hidden_layers=1)


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


def test_the_last_logits_alone(llama: nn.Module) -> None:
    for mask in (torch.ones_like(MASK), MASK):  # whose last tokens are all real, and two of four
        for kept in (1, 2):
            arguments = {"attention_mask": mask, "logits_to_keep": kept, "use_cache": False}
            assert difference(llama, (IDS, arguments), real=torch.ones_like(IDS[:, :kept])) < TOLERANCE
            assert sc.selective.reports[-1].ok, sc.selective.reports[-1]


def test_masks_of_any_zeros_and_ones(llama: nn.Module) -> None:
    """Holes, a row of padding alone, one real token in all, none: of one graph."""
    masks = (MASK, HOLES, EMPTY_ROW, ALONE, MASK)
    assert difference(llama, *((IDS, {"attention_mask": mask, "use_cache": False}) for mask in masks)) < TOLERANCE
    assert [report.ok for report in sc.selective.reports] == [True]


AS_IT_CAME: dict[str, dict[str, Any]] = {
    "a mask of floats": {"attention_mask": MASK.float(), "use_cache": False},
    "positions without a mask": {"position_ids": torch.arange(19)[None].expand(4, -1), "use_cache": False},
}


@pytest.mark.parametrize("name", AS_IT_CAME)
def test_arguments_of_a_call_that_runs_as_it_came(llama: nn.Module, name: str) -> None:
    assert difference(llama, (IDS, AS_IT_CAME[name])) < TOLERANCE
    assert not sc.selective.reports[-1].ok


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


def test_batches_of_one_and_tokens_of_one(llama: nn.Module) -> None:
    sizes = [(1, 19), (4, 19), (4, 1), (1, 1), (4, 4)]
    calls = [
        (IDS[:b, -s:].contiguous(), {"attention_mask": torch.ones(b, s, dtype=torch.int64), "use_cache": False})
        for b, s in sizes
    ]
    assert difference(llama, *calls) < TOLERANCE


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


def test_autocast_runs_as_it_came(llama: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert difference(llama, (IDS, {"attention_mask": MASK, "use_cache": False})) < TOLERANCE
    assert "autocast" in sc.selective.reports[-1].note
