"""Changed attentions come out exact or are refused; `selective-compile coverage --mutations` tries many more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from selective_compile import cli
from selective_compile.coverage import mutation_table
from selective_compile.coverage.mutation_table import mutation_page, wrong_ones
from selective_compile.coverage.mutations import MUTATED, MUTATIONS, Outcome, attention_changed, outcome
from selective_compile.coverage.sweep import registered_types
from selective_compile.coverage.trial import Trial

SMALL = Trial(requests=4)


def test_scores_and_masks_are_changed_and_functions_put_back() -> None:
    before = F.softmax, F.scaled_dot_product_attention
    scores, x = torch.zeros(1, 2, 4, 4), torch.randn(1, 2, 4, 8)
    with attention_changed(MUTATIONS["shifted"]):
        weights = F.softmax(scores, dim=-1)
        mixed = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        assert torch.equal(F.softmax(torch.zeros(4, 6), dim=-1), torch.full((4, 6), 1 / 6))  # no scores of tokens
    assert (F.softmax, F.scaled_dot_product_attention) == before
    assert torch.equal(weights.diagonal(dim1=-2, dim2=-1) == 0, torch.tensor([False, True, True, True]).expand(1, 2, 4))
    assert torch.equal(mixed[..., 1, :], x[..., 0, :])  # the second token sees the first alone


def test_scores_of_one_token_with_those_in_a_cache_are_changed_as_its_row_of_the_square() -> None:
    square, row = torch.zeros(1, 2, 5, 5), torch.zeros(1, 2, 1, 5)
    with attention_changed(MUTATIONS["bias added"]):
        assert torch.equal(F.softmax(row, dim=-1), F.softmax(square, dim=-1)[..., 4:, :])
        assert not torch.equal(F.softmax(row, dim=-1), row.softmax(-1))


def test_scores_with_sinks_are_changed_once_and_sinks_are_not() -> None:
    scores, sinks = torch.zeros(1, 2, 4, 4), torch.ones(1, 2, 4, 1)
    with attention_changed(MUTATIONS["shifted"], first="cat"):
        row = torch.cat([scores, sinks], dim=-1)
        weights = F.softmax(row, dim=-1)
    assert torch.equal(row[..., 4:], sinks) and torch.equal(weights, row.softmax(-1)) and not scores.any()
    assert bool((row[..., 1:, 1:4].diagonal(dim1=-2, dim2=-1) < -1e30).all())
    with attention_changed(MUTATIONS["bias added"], first="logsumexp"):
        total, weights = torch.logsumexp(scores, dim=-1), F.softmax(scores, dim=-1)
    assert torch.equal(total, scores.logsumexp(-1)) and torch.equal(weights, scores.softmax(-1))
    assert float(scores[0, 0, 2, 0]) == 1.0  # half of 2 % 3


@pytest.mark.parametrize(
    ("model_type", "mutation", "kind"),
    [
        ("llama", "non-causal", "refused"),
        ("gpt_neo", "widened", "refused"),
        ("bloom", "bias added", "refused"),
        ("gemma2", "window added", "exact"),
        ("gpt_oss", "window added", "exact"),
        ("gpt_oss", "shifted", "refused"),
        ("granite_swa", "window added", "exact"),
        ("deepseek_v3", "shifted", "refused"),
    ],
)
def test_changed_attention_is_exact_or_refused(model_type: str, mutation: str, kind: str) -> None:
    found = outcome(model_type, mutation, SMALL)
    assert found.kind == kind, found
    assert bool(found.reason) == (kind == "refused")


def test_proof_that_sees_nothing_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selective_compile.passes.mask_proof.agrees", lambda *_: True)
    assert outcome("gpt2", "dropped row", SMALL).kind == "wrong"


def test_page_and_exit_status_name_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    good = {name: Outcome(kind="refused", reason="it is changed") for name in MUTATIONS}
    bad = {**good, "shifted": Outcome(kind="wrong", error=0.5)}
    found: dict[str, Any] = {"gpt2": good, "llama": good}
    monkeypatch.setattr(mutation_table, "tried", lambda types, *, jobs, tell: {name: found[name] for name in types})
    page = tmp_path / "mutations.md"

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli.app, ["coverage", "--mutations", "--types", "gpt2,llama", *arguments])

    assert "--page must lie in a folder that exists" in run("--page", str(tmp_path / "missing" / "page.md")).stderr
    assert run("--page", str(page)).exit_code == 0
    assert "refused: 12" in page.read_text() and "| llama | shifted | it is changed |" in page.read_text()
    found["llama"] = bad
    assert wrong_ones(found) == ["llama shifted: wrong"]
    assert "**wrong** (5e-01)" in mutation_page(found)
    failed = run()
    assert failed.exit_code == 1 and "llama shifted: wrong" in failed.stderr


def test_types_that_are_tried_are_registered() -> None:
    assert len(MUTATED) == 20 and set(MUTATED) <= set(registered_types())
