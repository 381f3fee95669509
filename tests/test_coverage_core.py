"""No type of the core does worse than docs/coverage.json says; `make coverage` measures all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from selective_compile.bench.machine import versions
from selective_compile.coverage.families import CORE
from selective_compile.coverage.measure import measure
from selective_compile.coverage.standing import worse
from selective_compile.coverage.sweep import MEASURED
from selective_compile.coverage.trial import QUICK

COMMITTED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "docs" / "coverage.json").read_text())


@pytest.mark.parametrize("name", CORE)
def test_no_type_of_the_core_gets_worse(name: str) -> None:
    facts: dict[str, Any] = {}
    for part in measure(name, QUICK, with_padded=False):
        facts |= part
    # Of another release of transformers, only that nothing is wrong can be asked.
    before = COMMITTED["types"][name] if COMMITTED["versions"] == versions(MEASURED) else {}
    assert not worse(facts, before)
