"""Which combinations of parameters run of tests that are marked `sampled(by)`; `--exhaustive` runs all of them."""

from __future__ import annotations

from collections import defaultdict

import pytest


def take_turns(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out those whose turn it is not."""
    if config.getoption("exhaustive"):
        return
    left_out = not_sampled(items)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def not_sampled(items: list[pytest.Item]) -> set[pytest.Item]:
    """Those whose value of a `sampled` parameter is not the one whose turn it is.

    The first combination of a test's other parameters has the first of the values that it is given with, the next one
    the second of its own, and so on, so that all values are tried, each with some of the combinations.
    """
    values: dict[str, dict[tuple[str, ...], list[pytest.Item]]] = defaultdict(dict)
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker and isinstance(item, pytest.Function):
            (by,) = marker.args
            others = tuple(repr(value) for name, value in item.callspec.params.items() if name != by)
            test = item.nodeid.partition("[")[0]
            values[test].setdefault(others, []).append(item)
    left_out: set[pytest.Item] = set()
    for combinations in values.values():
        for turn, given in enumerate(combinations.values()):
            left_out |= set(given) - {given[turn % len(given)]}
    return left_out
