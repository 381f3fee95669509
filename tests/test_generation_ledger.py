"""The ledger of generation: complete, true to what the engine does, and with tests that exist."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from transformers import GenerationConfig
from typer.testing import CliRunner

from selective_compile import cli
from selective_compile.generation_ledger import (
    COMPARED_WHERE_NEUTRAL,
    LIMITS,
    MEANINGS,
    OF_GENERATE,
    TESTS,
    Entry,
    ledger,
    ledger_counts,
    ledger_markdown,
)
from selective_compile.runtime.generation_fields import (
    FIELDS,
    IMPLEMENTED,
    INSTEAD,
    NEUTRAL,
    WITHOUT_EFFECT,
    refuse_unsupported,
)
from tests.commands import refused
from tests.generation_rows import ROWS

ROOT = Path(__file__).parents[1]
ENTRIES = ledger()


def test_every_field_of_transformers_is_known() -> None:
    """A field that a later transformers brings fails here, until it has its line."""
    fields = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    assert [entry.field for entry in ENTRIES] == fields
    assert set(fields) == IMPLEMENTED | WITHOUT_EFFECT | set(INSTEAD)
    assert set(NEUTRAL) <= set(INSTEAD) and set(LIMITS) | set(TESTS) <= FIELDS


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.field)
def test_a_line_says_what_the_engine_does(entry: Entry) -> None:
    if entry.field in OF_GENERATE:
        with pytest.raises(ValueError, match="sc.generate returns them"):
            refuse_unsupported(entry.field, True, "")
        return
    if entry.status != "refused":
        refuse_unsupported(entry.field, "something", "")
        return
    for value in NEUTRAL.get(entry.field, ()):
        refuse_unsupported(entry.field, value, "")
    with pytest.raises(ValueError, match=f"'{entry.field}' must be"):
        refuse_unsupported(entry.field, "something", "")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.field)
def test_the_named_test_exists(entry: Entry) -> None:
    path, _, name = entry.test.partition("::")
    function, _, parameter = name.partition("[")
    defined = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert function in defined
    if parameter:
        assert parameter[:-1] in ROWS
    if entry.status == "refused":
        assert not parameter or entry.field in COMPARED_WHERE_NEUTRAL


def test_the_documentation_holds_the_ledger() -> None:
    text = (ROOT / "docs" / "generation.md").read_text()
    assert ledger_markdown(ENTRIES) in text, "write ledger_markdown(ledger()) into docs/generation.md"
    assert ledger_counts(ENTRIES) in text


def test_the_command_prints_it() -> None:
    run = CliRunner().invoke(cli.app, ["coverage", "--generation"], env={"COLUMNS": "100", "NO_COLOR": "1"})
    assert run.exit_code == 0, run.output
    for entry in ENTRIES:
        assert any(line.split()[:2] == [entry.field, entry.status] for line in run.stdout.splitlines()), entry
    assert ledger_counts(ENTRIES) in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 100


def test_the_command_as_json() -> None:
    run = CliRunner().invoke(cli.app, ["coverage", "--generation", "--json"])
    found = json.loads(run.stdout)
    assert [Entry(**one) for one in found] == ENTRIES
    assert {one["status"] for one in found} == set(MEANINGS)


def test_the_command_refuses_a_page() -> None:
    assert "--page must be left out with --generation" in refused("coverage", "--generation", "--page", "ledger.md")
