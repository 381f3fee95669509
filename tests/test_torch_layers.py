"""Decoders made of PyTorch's own layers, as tutorials have them: ragged, with the model's own logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch._meta_registrations
from torch import Tensor, nn

import selective_compile as sc
from tests.decoders import VOCABULARY, WIDTH, Residual
from tests.exactness import TOLERANCE, engine_error, padded_error

HEADS = 4


class Tutorial(nn.Module):
    """Two layers of ``nn.TransformerEncoder`` with a causal mask."""

    def __init__(self, *, mask: str = "float", is_causal: bool | None = None, heads: int = HEADS, **layer: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("places", torch.randn(64, WIDTH))
        made = nn.TransformerEncoderLayer(WIDTH, heads, 3 * WIDTH, **{"batch_first": True, **layer})
        self.layers = nn.TransformerEncoder(made, 2, enable_nested_tensor=False)
        self.head, self.mask, self.is_causal = nn.Linear(WIDTH, VOCABULARY), mask, is_causal
        self.eval()

    def hidden(self, length: int) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        return {
            "float": causal,
            "bool": causal < 0,
            "window": (causal < 0) | torch.ones_like(causal).tril(-9).bool(),
            "slopes": causal - (torch.arange(length)[:, None] - torch.arange(length)).abs(),
        }[self.mask]

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places[: input_ids.shape[1]]
        return self.head(self.layers(x, mask=self.hidden(input_ids.shape[1]), is_causal=self.is_causal))


class OfAttention(Tutorial):
    """The same of ``nn.MultiheadAttention`` alone."""

    def __init__(self, *, need_weights: bool = True, **attention: Any) -> None:
        super().__init__(mask="bool")
        del self.layers
        self.mix, self.need_weights = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **attention), need_weights
        self.eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places[: input_ids.shape[1]]
        mask = self.hidden(input_ids.shape[1])
        return self.head(x + self.mix(x, x, x, attn_mask=mask, need_weights=self.need_weights)[0])


# As of PyTorch 2.11, where such a layer runs isolated.
IS_TRACED = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_transformer_encoder_layer_fwd", "Meta")
of_the_fast_path = pytest.mark.skipif(not IS_TRACED, reason="PyTorch cannot trace an encoder layer's one operator")

CASES: dict[str, Any] = {
    "slow path": lambda: Tutorial(activation=torch.nn.functional.silu),
    "slow path, slopes": lambda: Tutorial(mask="slopes", bias=False, is_causal=False),
    "slow path, a window": lambda: Tutorial(mask="window", bias=False, is_causal=False),
    "attention and its weights": OfAttention,
    "attention": lambda: OfAttention(need_weights=False),
    "attention, slow path": lambda: OfAttention(bias=False),
}
FAST: dict[str, Any] = {
    "as it comes": Tutorial,
    "norm first": lambda: Tutorial(norm_first=True, activation="gelu"),
    "causal is said": lambda: Tutorial(is_causal=True),
    "it is said not to be": lambda: Tutorial(is_causal=False),
    "yes and no": lambda: Tutorial(mask="bool"),
    "a window": lambda: Tutorial(mask="window", norm_first=True),
}


@pytest.mark.parametrize("name", CASES)
def test_is_ragged(name: str) -> None:
    assert engine_error(CASES[name](), vocabulary=VOCABULARY) < TOLERANCE


@of_the_fast_path
@pytest.mark.parametrize("name", FAST)
def test_is_ragged_where_a_layer_is_one_operator(name: str) -> None:
    assert engine_error(FAST[name](), vocabulary=VOCABULARY) < TOLERANCE


@of_the_fast_path
def test_is_ragged_in_a_padded_call() -> None:
    error, report = padded_error(Tutorial(is_causal=True), vocabulary=VOCABULARY, masked=False)
    assert report.verdict == "ragged"
    assert error < TOLERANCE


@of_the_fast_path
def test_slopes_that_the_fast_path_takes_for_a_mask_are_one() -> None:
    # PyTorch's operator hides where a mask is not 0: with slopes each token sees itself alone.
    model = Tutorial(mask="slopes")
    assert sc.explain(model).verdict == "ragged"
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE


def test_a_mask_that_is_causal_for_short_requests_alone_is_refused_where_that_matters() -> None:
    with pytest.raises(sc.RefusedError, match="Could not guard on data-dependent expression"):
        engine_error(Tutorial(mask="window", bias=False), vocabulary=VOCABULARY)


class Channels(nn.Module):
    """A norm of channels between two transpositions, which goes by what training has kept."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        with torch.no_grad():
            for weight in (*norm.parameters(), *norm.buffers()):
                if weight.is_floating_point():
                    weight.uniform_(0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d, partial(nn.InstanceNorm1d, affine=True, track_running_stats=True)], ids=["batch", "each"]
)
def test_a_norm_by_what_training_has_kept_is_ragged(norm: Any) -> None:
    model = Residual(lambda: Channels(norm(WIDTH)), VOCABULARY, WIDTH).eval()
    assert sc.explain(model).verdict == "ragged"
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d], ids=["batch", "each"])
def test_a_norm_by_a_request_s_own_tokens_is_not(norm: Any) -> None:
    model = Residual(lambda: Channels(norm(WIDTH, track_running_stats=False)), VOCABULARY, WIDTH).eval()
    assert sc.explain(model).verdict in ("sequential", "refused")
