"""Products of heads with matrices of their own: the native kernel against the exact result, and the op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from selective_compile import latent_ops, reference
from selective_compile.implementations import forced_implementation
from selective_compile.kernels import head_products_cpu as launcher

pytestmark = pytest.mark.skipif(not launcher.available(), reason=str(launcher.unavailable_reason()))

ROWS = (0, 1, 2, 3, 5, 6, 23, 24, 61)
# heads, size, depth: multiples of every vector, and of none.
SIZES = ((4, 16, 64), (3, 12, 20), (2, 7, 33), (5, 64, 128), (1, 1, 3))


def drawn(rows: int, sizes: tuple[int, int, int], dtype: torch.dtype, transposed: bool) -> tuple[Tensor, Tensor]:
    """Parts of larger tensors, as a query and a weight are; what lies beside them is NaN."""
    heads, size, depth = sizes
    generator = torch.Generator().manual_seed(rows + size)
    x = torch.full((rows, heads, (size if transposed else depth) + 5), torch.nan)
    weight = torch.full((heads, size + 3, depth), torch.nan)
    x[..., 5:] = torch.randn(rows, heads, x.shape[2] - 5, generator=generator)
    weight[:, 2 : size + 2] = torch.randn(heads, size, depth, generator=generator) / depth**0.5
    return x.to(dtype)[..., 5:], weight.to(dtype)[:, 2 : size + 2]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", launcher.DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_remainder(sizes: tuple[int, int, int], dtype: torch.dtype, transposed: bool) -> None:
    for rows in ROWS:
        x, weight = drawn(rows, sizes, dtype, transposed)
        expected = reference.head_products(x.double(), weight.double(), transposed)
        found = launcher.head_products(x, weight, transposed)
        assert found.dtype == dtype and found.is_contiguous()
        torch.testing.assert_close(found.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 0, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_row_does_not_depend_on_the_others_or_on_threads(transposed: bool) -> None:
    x, weight = drawn(61, (8, 64, 128), torch.float32, transposed)
    whole = launcher.head_products(x, weight, transposed)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert torch.equal(launcher.head_products(x, weight, transposed), whole)
    torch.set_num_threads(before)
    for rows in (slice(0, 1), slice(3, 5), slice(20, 51)):
        assert torch.equal(launcher.head_products(x[rows], weight, transposed), whole[rows])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("implementation", ["auto", "reference", "triton"])
def test_the_op(implementation: str, transposed: bool) -> None:
    for dtype in (torch.float32, torch.float16):
        x, weight = drawn(7, (4, 16, 64), dtype, transposed)
        expected = reference.head_products(x.double(), weight.double(), transposed)
        with forced_implementation(implementation):  # type: ignore[arg-type]
            found = latent_ops.head_products(x, weight, transposed)
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=2e-3)
        torch.library.opcheck(latent_ops.head_products, (x, weight, transposed), test_utils=("test_faketensor",))


def test_what_does_not_fit_is_refused() -> None:
    x, weight = drawn(3, (4, 16, 64), torch.float32, transposed=False)
    for arguments, message in (
        ((x, weight, True), "weight must have a matrix for each head of x, got"),
        ((x, weight[:3], False), "weight must have a matrix for each head of x, got"),
        ((x.double(), weight, False), "got torch.float64"),
        ((x, weight.transpose(1, 2).contiguous().transpose(1, 2), False), "must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            launcher.head_products(*arguments)
