"""Steps that PyTorch's own kernels compute, for tests of what else makes a batch-invariant engine."""

from __future__ import annotations

import pytest

from selective_compile.runtime import invariance


@pytest.fixture
def eager_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's values are computed alike by those where a row is a number of whole vectors, and all are few enough for
    one thread, as here; so that engines may have `compile=False`."""
    monkeypatch.setattr(invariance, "_check_compiled", lambda program: None)
