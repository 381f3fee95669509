"""In which order files run: what takes long first, so that no process is left with it when the others are through."""

from __future__ import annotations

from collections import Counter

import pytest


def long_files_first(items: list[pytest.Item]) -> None:
    """Files by their number of tests that are marked slow, then by that of all; the tests of one in their order.

    For `--dist loadfile --no-loadscope-reorder`, which hands files to processes in this order.
    """
    slow: Counter[object] = Counter(item.path for item in items if item.get_closest_marker("slow"))
    tests: Counter[object] = Counter(item.path for item in items)
    places = {path: place for place, path in enumerate(tests)}
    items.sort(key=lambda item: (-slow[item.path], -tests[item.path], places[item.path]))
