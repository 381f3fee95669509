"""Calls made by native code: each function gets its arguments, and a failure ends the row."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from selective_compile.kernels import call_sequence_cpu, native
from selective_compile.kernels.call_sequence_cpu import MOST_ARGUMENTS, THREW, make_calls

pytestmark = pytest.mark.skipif(not call_sequence_cpu.available(), reason=str(call_sequence_cpu.unavailable_reason()))

SOURCE = """
#include <cstdint>
#include <stdexcept>
static int64_t got[64], calls;
template <typename... A> static void note(A... values) { int64_t i = 0; ((got[i++] = values), ...); ++calls; }
extern "C" int64_t* results() { return got; }
extern "C" int64_t made() { int64_t n = calls; calls = 0; return n; }
extern "C" void none() { ++calls; }
extern "C" void one(int64_t a) { note(a); }
extern "C" void three(int64_t a, int64_t b, int64_t c) { note(a, b, c); }
extern "C" void most(ALL) { note(NAMES); }
extern "C" int packed(const int64_t* values) { note(values[0], values[1]); return 0; }
extern "C" int fails(const int64_t*) { return 7; }
extern "C" void throws() { throw std::runtime_error("no"); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    names = [f"a{i}" for i in range(MOST_ARGUMENTS)]
    every = ", ".join(f"int64_t {name}" for name in names)
    source = tmp_path_factory.mktemp("calls") / "calls.cpp"
    Path(source).write_text(SOURCE.replace("ALL", every).replace("NAMES", ", ".join(names)))
    found = native.load(source, cache=source.parent)
    found.results.restype = ctypes.POINTER(ctypes.c_int64)
    yield found


def at(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def plain(*values: int) -> list[int]:
    return [number for value in values for number in (0, value, 0)]


def test_arguments_are_bases_constants_and_products_of_symbols(library: ctypes.CDLL) -> None:
    code = array("q", [at(library, "three"), 0, 0, 3, *(2, 5, 0), *(0, 1, 2, 0, 10, 1, -1), *plain(9)])
    assert make_calls(code, 1, array("q", [0, 100, 1000]), array("q", [4, 7])) == 0
    assert library.results()[:3] == [1005, 1 + 40 - 7, 9]


@pytest.mark.parametrize(("name", "count"), [("none", 0), ("one", 1), ("most", MOST_ARGUMENTS)])
def test_any_number_of_arguments(library: ctypes.CDLL, name: str, count: int) -> None:
    library.made()
    code = array("q", [at(library, name), 0, 0, count, *plain(*range(3, 3 + count))])
    assert make_calls(code, 1, array("q", [0]), array("q")) == 0
    assert library.results()[:count] == list(range(3, 3 + count)) and library.made() == 1


def test_a_function_may_take_their_address_and_what_fails_ends_the_row(library: ctypes.CDLL) -> None:
    packed = [at(library, "packed"), 1, 1, 2, *plain(11, 12)]
    failing = [at(library, "fails"), 1, 1, 0]
    library.made()
    assert make_calls(array("q", [*packed, *failing, *packed]), 3, array("q", [0]), array("q")) == 7
    assert library.results()[:2] == [11, 12] and library.made() == 1
    thrown = [at(library, "throws"), 0, 0, 0]
    assert make_calls(array("q", [*packed, *thrown, *packed]), 3, array("q", [0]), array("q")) == THREW
    assert library.made() == 1
