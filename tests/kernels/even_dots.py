"""Triton's interpreter with a dot in which every element of the product is summed in the same order.

Its own is numpy's, whose library sums a row of a small matrix in an order that depends on the row's place. On a GPU all
elements of a tile's product go through the same instructions. What is left to test is what a kernel does around them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from triton.runtime import interpreter


def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """a [m, k] times b [k, n] added to d [m, n], one k after another."""
    total = d.data.copy()
    for k in range(a.data.shape[1]):
        total += (a.data[:, k, None] * b.data[None, k]).astype(total.dtype)
    return interpreter.TensorHandle(total, d.dtype.scalar)


@pytest.fixture(scope="module", autouse=True)
def even_dots() -> Iterator[None]:
    """For every test of the module that imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield
