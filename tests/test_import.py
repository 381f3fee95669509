"""What importing the package does, and what it leaves to those who use it."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT_ENTRY_POINT = """
import importlib.metadata
importlib.metadata.entry_points = lambda **wanted: importlib.metadata.EntryPoints()
"""


def printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_installed_it_imports_nothing_that_takes_time() -> None:
    if not int(printed("from importlib.metadata import entry_points as e; print(len(e(name='selective')))")):
        pytest.skip("not installed")
    assert printed("import sys, selective_compile; print('torch' in sys.modules)") == "False\n"


def test_in_a_checkout_it_makes_the_backend_known() -> None:
    code = "import selective_compile, torch; print(torch.compiler.list_backends(exclude_tags=()))"
    assert "'selective'" in printed(f"{WITHOUT_ENTRY_POINT}{code}")
    code = "import torch; print(torch.compiler.list_backends(exclude_tags=()))"
    assert "'selective'" not in printed(f"{WITHOUT_ENTRY_POINT}{code}")
