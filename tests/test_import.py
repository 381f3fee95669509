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


def test_a_backend_that_was_installed_behind_torchs_look_is_made_known() -> None:
    code = """
import importlib.metadata
known = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **wanted: importlib.metadata.EntryPoints()
import torch
assert "selective" not in torch.compiler.list_backends(exclude_tags=())
importlib.metadata.entry_points = known
import selective_compile
print("selective" in torch.compiler.list_backends(exclude_tags=()))
"""
    assert printed(code) == "True\n"


def test_threads_that_ask_for_different_names_at_once_get_them() -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
import selective_compile as sc
with ThreadPoolExecutor(len(sc.__all__)) as threads:
    found = list(threads.map(lambda name: getattr(sc, name).__class__ is not None, sc.__all__))
print(all(found), {"HOMES", "Any"} & set(dir(sc)))
"""
    assert printed(code) == "True set()\n"


def test_every_name_of_the_runtime_is_listed_before_it_is_used() -> None:
    code = """
import selective_compile as sc
print(sorted(set(sc.runtime.__all__) - set(dir(sc.runtime))), "engine" in dir(sc.runtime))
"""
    assert printed(code) == "[] True\n"
