"""The adapter for transformers' own generation tests tells passed, refused and failed apart, and counts no others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = """
import unittest
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

class GenerationTesterMixin:
    def model(self):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                             num_attention_heads=2, num_key_value_heads=2, eos_token_id=None, pad_token_id=0)
        return LlamaForCausalLM(config).eval()

    def test_passes(self):
        out = self.model().generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, do_sample=False)
        self.assertEqual(out.shape, (1, 5))
        with self.assertRaises(ValueError):
            self.model().generate(torch.tensor([[3, 4, 5]]), max_new_tokens=-2)

    def test_is_refused(self):
        cache = DynamicCache()
        self.model().generate(torch.tensor([[3, 4]]), past_key_values=cache, max_new_tokens=2)

    def test_looks_inside(self):
        out = self.model().generate(torch.tensor([[3, 4]]), max_new_tokens=2, return_dict_in_generate=True)
        self.assertIsNotNone(out.past_key_values)

    def test_does_not_pass_alone(self):
        self.model().generate(torch.tensor([[3, 4]]), no_such_argument=1)

    def test_calls_nothing(self):
        pass

    def test_is_skipped(self):
        self.skipTest("needs something else")

    @pytest.mark.torch_compile_test
    def test_compiles(self):
        self.model().generate(torch.tensor([[3, 4]]), max_new_tokens=2)

class ModelTest(GenerationTesterMixin, unittest.TestCase):
    def test_of_something_else(self):
        self.model().generate(torch.tensor([[3, 4]]), max_new_tokens=2)
"""


def test_what_is_counted_and_how(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "models" / "llama"
    folder.mkdir(parents=True)
    (tmp_path / "tests" / "generation").mkdir()
    (tmp_path / "tests" / "generation" / "test_utils.py").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = torch_compile_test: compiles\n")
    (folder / "test_modeling_llama.py").write_text(TESTS)
    found = tmp_path / "rows.json"
    run = [sys.executable, str(ROOT / "tests" / "hf_generation" / "run.py"), str(tmp_path)]
    done = subprocess.run(
        [*run, "--types", "llama", "--json", str(found), "--about", "A made-up one."], capture_output=True, text=True
    )
    assert done.returncode == 1 and "1 passed, 1 refused, 1 failed of 3: 33% pass, bar 90%: MISSED" in done.stdout, done
    rows = {row["test"]: row for row in json.loads(found.read_text())}
    outcomes = {"test_passes": "passed", "test_is_refused": "refused", "test_looks_inside": "failed"}
    assert {name: row["outcome"] for name, row in rows.items()} == outcomes
    assert rows["test_is_refused"]["reason"].startswith("ValueError: a call must be for a tensor, ")
    assert "past_key_values is the model's own cache" in rows["test_is_refused"]["reason"]
    page = found.with_suffix(".md").read_text()
    assert "| llama | 1 | 1 | 1 |" in page and "| `test_is_refused` | llama | refused: " in page
    assert "A made-up one." in page
    wrong = subprocess.run([*run[:-1], str(folder)], capture_output=True, text=True)
    assert wrong.returncode == 2 and "checkout must hold tests/generation/test_utils.py" in wrong.stderr
