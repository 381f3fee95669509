"""Products of float32 that are asked for with fewer bits: what differs by rounding alone is not taken for a branch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import selective_compile as sc
from selective_compile.isolation_trial import alike
from selective_compile.kept_captures import settings_of_process
from selective_compile.rounding import coarsest, computed_in, products_in, rounded_as, tolerance
from tests.decoders import Decoder
from tests.huggingface.models import CONFIG, left_padded, tiny

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def by_name(name: str) -> Callable[[], None]:
    return lambda: torch.set_float32_matmul_precision(name)


def by_backend(backend: Any, name: str) -> Callable[[], None]:
    return lambda: setattr(backend, "fp32_precision", name)


LESS: dict[str, tuple[Callable[[], None], torch.dtype, torch.dtype]] = {
    "high": (by_name("high"), torch.float16, torch.float16),
    "medium": (by_name("medium"), torch.bfloat16, torch.float16),
    "of a CPU": (by_backend(torch.backends.mkldnn.matmul, "bf16"), torch.bfloat16, torch.float32),
    "of a GPU": (by_backend(torch.backends.cuda.matmul, "tf32"), torch.float32, torch.float16),
}


@pytest.fixture(params=LESS)
def less(request: pytest.FixtureRequest) -> Iterator[str]:
    matmuls = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    LESS[request.param][0]()
    yield request.param
    torch.set_float32_matmul_precision("highest")
    for each in matmuls:
        each.fp32_precision = "none"


def test_the_dtype_that_products_are_rounded_as(less: str) -> None:
    _, on_cpu, on_gpu = LESS[less]
    assert rounded_as(torch.float32, CPU) is on_cpu and rounded_as(torch.float32, GPU) is on_gpu
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        assert rounded_as(dtype, CPU) is dtype
    assert tolerance(torch.float32, CPU) == tolerance(on_cpu, CPU)


def test_models_run_ragged_as_without(less: str) -> None:
    model, (ids, mask) = tiny(), left_padded()
    assert sc.explain(model).verdict == "ragged"
    assert sc.generate(model, ids, attention_mask=mask, max_new_tokens=2, engine_config=CONFIG).shape == (3, 11)


def test_a_branch_on_one_token_is_found_all_the_same(less: str) -> None:
    with pytest.raises(sc.RefusedError, match="branch on one token"):
        sc.Engine(Decoder(layers=1, mix=lambda x: -x if x.shape[1] == 1 else x), CONFIG)


def test_captures_are_kept(less: str) -> None:
    """What is asked of PyTorch's settings can be answered, by whichever of its functions they were set."""
    assert settings_of_process()


def test_as_much_as_before_where_nothing_was_asked() -> None:
    assert rounded_as(torch.float32, CPU) is torch.float32 and tolerance(torch.float32, CPU) == 1e-3


def test_products_may_be_known_to_be_of_other_types_than_weights() -> None:
    model, logits = Decoder(layers=1), torch.zeros(3)
    with products_in({torch.float32, torch.bfloat16}):
        assert computed_in(model, logits) is torch.bfloat16
    assert computed_in(model, logits) is torch.float32


def test_a_result_is_rounded_as_what_it_was_computed_from() -> None:
    model, logits = Decoder(layers=1), torch.zeros(3)
    assert computed_in(model, logits) is torch.float32 and computed_in(model, logits.half()) is torch.float16
    model.norm.bfloat16()  # a vector, whose products with others have the bits of these
    assert computed_in(model, logits) is torch.float32
    model.head.bfloat16()
    assert computed_in(model, logits) is torch.bfloat16
    assert coarsest([torch.int64, torch.float64, torch.float32]) is torch.float32


def test_rows_that_are_rounded_otherwise_are_alike() -> None:
    rows = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    rounded, model = rows.bfloat16().float(), Decoder(layers=1)
    assert not alike(model, rounded, rows)
    assert alike(model.bfloat16(), rounded, rows) and not alike(model, rows.flip(0), rows)
