"""The native CPU kernels of the ops with a state against the exact result, for every dtype and number of threads."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selective_compile.kernels import state_cpu as launcher
from tests.kernels.instruction_sets import ARCHITECTURES, built_for, runs
from tests.kernels.state_cases import CASES, OPS, SIZES, Call, StateCase, any_case, exact, exact_step, make_call

pytestmark = pytest.mark.skipif(not launcher.available(), reason=str(launcher.unavailable_reason()))

# bfloat16 and float16: half a unit in the last place of results up to 8.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
RUNS = [(case, dtype) for case in CASES for dtype in TOLERANCE]


@pytest.fixture
def nan_filled_outputs(monkeypatch):
    """What the launcher allocates holds NaN, so that an element the kernel leaves out shows."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **options: empty_like(tensor, **options).fill_(torch.nan))


@pytest.fixture(params=(1, 2), ids=("one_thread", "two_threads"))
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def check(call: Call, wanted: tuple[Tensor, Tensor | None] | None = None) -> None:
    expected, pool = wanted or exact(call)
    output = call.run(launcher)
    rows = next(call.arguments[name] for name in ("x", "value", "update") if name in call.arguments)
    assert (output.dtype, output.shape) == (rows.dtype, expected.shape)
    tolerance = TOLERANCE[output.dtype]
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    if pool is None:
        return
    # Slots that nobody writes hold what they held, NaN among it.
    bound = 0 if call.op == "causal_conv1d" else 3e-5
    torch.testing.assert_close(call.pool.double(), pool, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=str)
def test_a_step(case, dtype, threads, nan_filled_outputs):
    check(make_call(case, dtype), exact_step(case, dtype))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_without_a_pool(case, nan_filled_outputs):
    check(make_call(case, torch.float32).fresh())


@pytest.mark.parametrize("op", OPS)
def test_a_step_without_rows(op):
    case = StateCase(op=op, name="", sizes=SIZES[op][0], requests=((0, 3), (0, 0)), padding_rows=0)
    check(make_call(case, torch.float32))


@pytest.mark.parametrize("op", OPS)
def test_a_nan_stays_in_its_request(op):
    """Requests of one row share a thread's memory, one after another."""
    case = StateCase(op=op, name="", sizes=SIZES[op][1], requests=((2, 4), (1, 3), (1, 0), (1, 0), (1, 5)))
    clean, spoilt = make_call(case, torch.float32), make_call(case, torch.float32)
    rows = next(name for name in ("x", "value", "update") if name in spoilt.arguments)
    spoilt.arguments[rows][2] = torch.nan
    expected, output = clean.run(launcher), spoilt.run(launcher)
    others = [0, 1, *range(3, len(output))]
    assert output[2].isnan().all()
    assert torch.equal(output[others], expected[others])
    slots = [int(slot) for n, slot in enumerate(spoilt.arguments["state_slots"]) if n != 1]
    assert torch.equal(spoilt.pool[slots], clean.pool[slots])


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_step(op, data):
    check(make_call(data.draw(any_case(op)), data.draw(st.sampled_from(list(TOLERANCE))), data.draw(st.integers(0, 9))))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_instruction_set(architecture, tmp_path, monkeypatch, nan_filled_outputs):
    if not runs(architecture):
        pytest.skip(f"this processor is no {architecture}")
    library = built_for(architecture, launcher.__file__, tmp_path)
    monkeypatch.setitem(launcher._functions._functions, "selective_state", library.selective_state)
    for case, dtype in RUNS:
        check(make_call(case, dtype), exact_step(case, dtype))


def one_request(call: Call, n: int) -> Call:
    """Request n of the call by itself."""
    bounds = call.arguments["cu_seqlens_q"].tolist()
    rows = slice(bounds[n], bounds[n + 1])
    total, parameters = bounds[-1], ("weight", "bias", "A", "D", "time_decay", "time_first")
    changes = {
        name: value[rows]
        for name, value in call.arguments.items()
        if isinstance(value, Tensor) and len(value) >= total and name not in (*parameters, "state_pool")
    }
    changes["cu_seqlens_q"] = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
    return call.replaced(
        **changes,
        context_lens=call.arguments["context_lens"][n : n + 1],
        state_slots=call.arguments["state_slots"][n : n + 1],
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_results_do_not_depend_on_threads_or_on_the_batch(op, dtype):
    # Enough of a step that three threads take it, and enough channels for each of them.
    requests = ((1, 4), (300, 0), (1, 0), (9, 9), (1, 1), (1, 2))
    sizes = {"causal_conv1d": (600, 4), "selective_scan": (300, 0, 16), "linear_recurrence": (600,), "wkv": (600,)}
    case = StateCase(op=op, name="", sizes=sizes.get(op, SIZES[op][1]), requests=requests)
    whole, again, alone = (make_call(case, dtype) for _ in range(3))
    expected = whole.run(launcher)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    assert torch.equal(again.run(launcher), expected)
    torch.set_num_threads(before)
    parts = [one_request(alone, n).run(launcher) for n in range(len(case.requests))]
    assert torch.equal(torch.cat(parts), expected[: sum(map(len, parts))])
    for call in (again, alone):
        torch.testing.assert_close(call.pool, whole.pool, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", OPS)
def test_a_pool_may_be_part_of_a_larger_buffer_and_rows_of_any_layout(op):
    call = make_call(StateCase(op=op, name="", sizes=SIZES[op][0]), torch.float32)
    buffer = torch.full((len(call.pool), 3, *call.pool.shape[1:]), 7.0)
    buffer[:, 1] = call.pool
    turned = {
        name: value.mT.contiguous().mT
        for name, value in call.arguments.items()
        if isinstance(value, Tensor) and value.dim() > 1 and name != "state_pool"
    }
    call = call.replaced(state_pool=buffer[:, 1], **turned)
    check(call)
    assert buffer[:, [0, 2]].eq(7.0).all()


def test_decays_beyond_the_range_of_an_exponential():
    """exp(dt * A) of a large step is 0, not NaN; and infinite only where it is."""
    call = make_call(StateCase(op="selective_scan", name="", sizes=(5, 0, 3), requests=((4, 2),)), torch.float32)
    call.arguments["dt"][1] = 1e4
    call.arguments["dt"][2] = 0.0
    check(call)


def test_wkv_of_extreme_keys():
    call = make_call(StateCase(op="wkv", name="", sizes=(40,), requests=((9, 0), (9, 4))), torch.float32)
    call.arguments["key"][::2] *= 300
    check(call)


def bad_arguments(call: Call) -> dict[str, dict[str, object]]:
    slots = call.arguments["state_slots"].clone()
    slots[0] = len(call.pool)
    bounds = call.arguments["cu_seqlens_q"].clone()
    bounds[-1] += 30
    return {
        "the rows must be float32, bfloat16 or float16, got torch.float64": {"x": call.arguments["x"].double()},
        "B must be [80, 2, 64]": {"B": call.arguments["B"][1:]},
        "dt must be [80, 4], got [80, 3]": {"dt": call.arguments["dt"][:, 1:]},
        "A must be [4], got [3]": {"A": call.arguments["A"][1:]},
        "D must be [4], got [1]": {"D": call.arguments["D"][:1]},
        "state_pool must be [num_slots, *[4, 24, 64]] torch.float32": {"state_pool": call.pool[:, :, 1:]},
        "torch.float32, got [9, 4, 24, 64] torch.float16": {"state_pool": call.pool.half()},
        "a slot of state_pool must be contiguous": {"state_pool": call.pool.mT.contiguous().mT},
        "context_lens and state_slots must be given": {"state_slots": None},
        "cu_seqlens_q must be contiguous [N + 1] int32": {"cu_seqlens_q": call.arguments["cu_seqlens_q"].long()},
        "context_lens must be int32": {"context_lens": call.arguments["context_lens"].long()},
        "must be contiguous and have N entries": {"context_lens": call.arguments["context_lens"][1:]},
        "cu_seqlens_q must start at 0": {"cu_seqlens_q": call.arguments["cu_seqlens_q"] + 4},
        "end at or below the number of rows": {"cu_seqlens_q": bounds},
        "context_lens must be at least": {"context_lens": call.arguments["context_lens"] - 30},
        "state_slots must name slots of the pool": {"state_slots": slots},
    }


BAD_REQUESTS = ((40, 3), (1, 0), (20, 7), (2, 2), (2, 2), (2, 2), (2, 2))
BAD = StateCase(op="ssd", name="bad", sizes=(4, 2, 24, 64), requests=BAD_REQUESTS, padding_rows=11)


@pytest.mark.parametrize("message", bad_arguments(make_call(BAD, torch.float32)))
def test_bad_arguments_are_refused_and_nothing_is_written(message):
    call = make_call(BAD, torch.float32)
    bad = call.replaced(**bad_arguments(call)[message])
    before = call.pool.clone()
    with pytest.raises(ValueError, match=re.escape(message)):
        bad.run(launcher)
    torch.testing.assert_close(call.pool, before, rtol=0, atol=0, equal_nan=True)


def test_groups_that_do_not_divide_the_heads_are_refused():
    call = make_call(BAD, torch.float32)
    groups = {name: call.arguments[name].repeat(1, 2, 1)[:, :3] for name in ("B", "C")}
    with pytest.raises(ValueError, match="the groups must divide 4, got 3"):
        call.replaced(**groups).run(launcher)
