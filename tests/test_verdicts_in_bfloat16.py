"""What is ragged in float32 is so in bfloat16, which most checkpoints are in: rounding alone changes no verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import selective_compile as sc
from selective_compile.coverage.random_model import random_model

TABLE = json.loads((Path(__file__).parents[1] / "docs" / "coverage.json").read_text(encoding="utf-8"))["types"]
# Which transformers itself cannot run in bfloat16 behind `model.to`, xlstm without a cache.
CANNOT = ("inkling2_text", "inkling2_loop_text", "xlstm")
PROVED = [kind for kind, row in TABLE.items() if row.get("verdict") in ("ragged", "isolated") and kind not in CANNOT]


@pytest.mark.parametrize("kind", PROVED)
def test_the_verdict_is_that_of_float32(kind: str) -> None:
    assert sc.explain(random_model(kind).to(torch.bfloat16)).verdict == TABLE[kind]["verdict"]


@pytest.mark.parametrize("kind", CANNOT)
def test_what_is_left_out_cannot_be_run(kind: str) -> None:
    with pytest.raises(RuntimeError), torch.no_grad():
        random_model(kind).to(torch.bfloat16)(torch.arange(40)[None], use_cache=False)
