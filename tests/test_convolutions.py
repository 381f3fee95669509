"""Causal convolutions of every kind in a model of somebody's own: ragged, and exact in chunks of a request."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selective_compile as sc
from tests.decoders import Residual
from tests.exactness import TOLERANCE, engine_error, padded_error, step_program

VOCABULARY, WIDTH = 31, 16
Mix = Callable[[list[nn.Conv1d], nn.Linear, Tensor], Tensor]  # of [B, S, C]


class Mixer(nn.Module):
    def __init__(self, mix: Mix, *convolutions: nn.Conv1d) -> None:
        super().__init__()
        self.mix, self.convolutions, self.linear = mix, nn.ModuleList(convolutions), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mix(list(self.convolutions), self.linear, hidden.tanh())  # type: ignore[arg-type]


def convolution(width: int, groups: int = 1, *, padding: int = 0, dilation: int = 1, bias: bool = True) -> nn.Conv1d:
    return nn.Conv1d(WIDTH, WIDTH, width, groups=groups, padding=padding, dilation=dilation, bias=bias)


def behind_zeros(zeros: int) -> Mix:
    """The convolutions one behind the other."""

    def mix(convolutions: list[nn.Conv1d], linear: nn.Linear, x: Tensor) -> Tensor:
        rows = F.pad(x.mT, (zeros, 0))
        for each in convolutions:
            rows = each(rows)
        return rows.mT

    return mix


def turned(convolutions: list[nn.Conv1d], linear: nn.Linear, x: Tensor) -> Tensor:
    return convolutions[0](F.pad(x, (0, 0, 2, 0)).transpose(1, 2)).transpose(1, 2)


def joined(convolutions: list[nn.Conv1d], linear: nn.Linear, x: Tensor) -> Tensor:
    return convolutions[0](torch.cat([x.new_zeros(x.shape[0], WIDTH, 2), x.mT], 2)).mT


def cut(convolutions: list[nn.Conv1d], linear: nn.Linear, x: Tensor) -> Tensor:
    return convolutions[0](x.mT)[..., : x.shape[1]].mT


def each_padded(convolutions: list[nn.Conv1d], linear: nn.Linear, x: Tensor) -> Tensor:
    first, second = convolutions
    return second(F.pad(first(F.pad(x.mT, (2, 0))).relu(), (1, 0))).mT


def delayed(convolutions: list[nn.Conv1d], linear: nn.Linear, x: Tensor) -> Tensor:
    """What the layer makes of zeros is in front, its bias."""
    front = linear(x.new_zeros(x.shape[0], 1, WIDTH))
    return torch.cat([front, linear(x)[:, :-1]], 1)


def delayed_twice(convolutions: list[nn.Conv1d], linear: nn.Linear, x: Tensor) -> Tensor:
    return torch.cat([linear(torch.zeros_like(x[:, :2])), linear(x)[:, :-2]], 1)


def two_readers(convolutions: list[nn.Conv1d], linear: nn.Linear, x: Tensor) -> Tensor:
    """Of what the first gives the second reads all, and the sum what is there for each token."""
    first = convolutions[0](F.pad(x.mT, (2, 0)))
    return convolutions[1](first).mT + first[..., 1:].mT


def too_early(convolutions: list[nn.Conv1d], linear: nn.Linear, x: Tensor) -> Tensor:
    return convolutions[0](F.pad(x.mT, (1, 1))).mT


def windows(convolutions: list[nn.Conv1d], linear: nn.Linear, x: Tensor) -> Tensor:
    """As Inkling 2 has them: weights of each token's own for those in front of it."""
    seen = F.pad(x.mT, (2, 0))[..., -(x.shape[1] + 2) :].unfold(-1, 3, 1)  # [B, C, S, 3]
    return (seen.flip(-1) * linear(x).mT[:, :3].transpose(1, 2)[:, None]).sum(-1).mT


def windows_of_rows(convolutions: list[nn.Conv1d], linear: nn.Linear, x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1).amax(-1) * linear(x)


def windows_of_others(convolutions: list[nn.Conv1d], linear: nn.Linear, x: Tensor) -> Tensor:
    """One token further than zeros in front reach, so that each sees the next."""
    return F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1).sum(-1)


RAGGED: dict[str, tuple[Mix, tuple[nn.Conv1d, ...]]] = {
    "depthwise": (behind_zeros(3), (convolution(4, WIDTH),)),
    "depthwise, padded in front of tokens": (turned, (convolution(3, WIDTH),)),
    "depthwise, behind zeros": (joined, (convolution(3, WIDTH),)),
    "all channels": (behind_zeros(2), (convolution(3),)),
    "all channels, cut": (cut, (convolution(3, padding=2),)),
    "groups": (behind_zeros(2), (convolution(3, 4),)),
    "groups, padded in front of tokens": (turned, (convolution(3, 4, bias=False),)),
    "groups, of a token each": (behind_zeros(0), (convolution(1, 4),)),
    "of several for each channel": (
        behind_zeros(2),
        (nn.Conv1d(WIDTH, 2 * WIDTH, 3, groups=WIDTH), nn.Conv1d(2 * WIDTH, WIDTH, 1, groups=4)),
    ),
    "depthwise, then groups": (behind_zeros(2), (convolution(2, WIDTH), convolution(2, 4))),
    "depthwise, then groups, without biases": (
        behind_zeros(4),
        (convolution(3, WIDTH, bias=False), convolution(3, 4, bias=False)),
    ),
    "groups, then all channels": (behind_zeros(3), (convolution(2, 4), convolution(3))),
    "each behind zeros": (each_padded, (convolution(3, WIDTH), convolution(2))),
    "a linear layer of the token before": (delayed, ()),
    "windows": (windows, ()),
    "windows of rows": (windows_of_rows, ()),
}
NOT_RAGGED: dict[str, tuple[Mix, tuple[nn.Conv1d, ...]]] = {
    "dilated": (behind_zeros(4), (convolution(3, WIDTH, dilation=2),)),
    "depthwise behind another": (behind_zeros(2), (convolution(2, 4), convolution(2, WIDTH))),
    "over many tokens": (behind_zeros(39), (convolution(40, 4),)),
    "two readers": (two_readers, (convolution(2, WIDTH), convolution(2, 4))),
    "two tokens of no zeros": (delayed_twice, ()),
    "sees the next token": (too_early, (convolution(3, 4),)),
    "windows that see the next token": (windows_of_others, ()),
}


def model_of(mix: Mix, convolutions: tuple[nn.Conv1d, ...]) -> Residual:
    return Residual(lambda: Mixer(mix, *convolutions), VOCABULARY, WIDTH).eval()


@pytest.mark.parametrize("name", RAGGED)
def test_causal_convolutions_are_ragged_and_exact(name: str) -> None:
    model = model_of(*RAGGED[name])
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE
    error, report = padded_error(model, vocabulary=VOCABULARY, masked=False)
    assert report.ok and error < TOLERANCE


@pytest.mark.parametrize("width", [768, 2048])
def test_requests_are_not_bounded_by_where_pytorch_takes_another_library(width: int) -> None:
    """It asks whether there are more than 20,480 elements, which 12 tokens of 2,048 channels are."""
    convolution = nn.Conv1d(width, width, 2)
    model = Residual(lambda: Mixer(behind_zeros(1), convolution), VOCABULARY, width).eval()
    assert step_program(model).max_positions is None


@pytest.mark.parametrize("name", NOT_RAGGED)
def test_others_run_by_themselves_or_are_refused(name: str) -> None:
    model = model_of(*NOT_RAGGED[name])
    with pytest.raises(sc.RefusedError):
        engine_error(model, vocabulary=VOCABULARY)


def test_weights_are_read_at_each_step() -> None:
    model = model_of(*RAGGED["depthwise, then groups"])
    program = step_program(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    assert engine_error(model, vocabulary=VOCABULARY, program=program) < TOLERANCE
