"""A refusal says the same wherever it is caught."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest

from selective_compile.passes import Refusal, RefusedError
from selective_compile.passes.refusals import SHOWN
from selective_compile.report import refused_report

REFUSAL = Refusal(node="cumsum", operator="aten.cumsum", reason="mixes tokens", source_line="m.py:3", module="layers.0")


def refuse() -> None:
    raise RefusedError([REFUSAL], "nor can it run whole")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_refusal_can_be_pickled_and_copied(protocol: int) -> None:
    error = RefusedError([REFUSAL], "nor can it run whole")
    error.add_note("layer by layer")
    for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is RefusedError and str(again) == str(error) and again.args == error.args
        assert again.refusals == (REFUSAL,) and again.__notes__ == ["layer by layer"]


def test_a_workers_refusal_reaches_the_process_that_waits() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as workers:
        with pytest.raises(RefusedError, match="mixes tokens") as raised:
            workers.submit(refuse).result()
    assert raised.value.refusals == (REFUSAL,)


def test_of_many_refusals_the_text_has_the_first_and_their_number() -> None:
    many = [replace(REFUSAL, module=f"layers.{layer}") for layer in range(32)]
    text = str(RefusedError(many, "nor can it run whole"))
    assert text.startswith("32 operation(s) could not be proved") and text.count("mixes tokens") == SHOWN
    assert text.endswith("and 24 more, which `refusals` has\n  nor can it run whole")
    report = refused_report("graph", "runs as it came", tuple(many))
    assert str(report).count("\n") < 2 * SHOWN + 5 and report.refusals == tuple(many)
    assert "more" not in str(refused_report("graph", "runs as it came", tuple(many[:SHOWN])))
