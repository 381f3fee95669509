"""The references of the ops with a state against transformers' own functions, and against themselves cut in pieces."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu
from transformers.models.xlstm.modeling_xlstm import mlstm_recurrent_sequence_native

from selective_compile import state_reference
from tests.kernels.state_cases import CASES, OPS, SIZES, Call, StateCase, any_case, exact, make_call

ROWS = 37


def one_request(op: str, sizes: tuple[int, ...], past: int, **options: bool) -> Call:
    return make_call(
        StateCase(op=op, name="", sizes=sizes, requests=((ROWS, past),), padding_rows=0, **options), torch.float32
    )


def initial(call: Call) -> Tensor | None:
    """The state that the request continues from, [1, ...], or None."""
    begins = int(call.arguments["context_lens"][0]) == ROWS
    return None if begins else call.pool[call.arguments["state_slots"]].clone()


def rows_of(call: Call, *names: str) -> list[Tensor]:
    """[1, T, ...], as transformers has them."""
    return [call.arguments[name][None] for name in names]


def assert_same(call: Call, before: Tensor | None, output: Tensor, state: Tensor | None) -> None:
    """The reference gives the output [T, ...] and leaves the state [...]."""
    torch.testing.assert_close(call.run(state_reference), output, rtol=1e-4, atol=1e-4)
    if state is not None:
        left = call.pool[call.arguments["state_slots"][0]]
        torch.testing.assert_close(left, state, rtol=1e-4, atol=1e-4)
        assert before is None or not torch.equal(left, before[0])


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("sizes", SIZES["causal_conv1d"], ids=str)
@pytest.mark.parametrize("past", [0, 50])
def test_causal_conv1d_is_a_padded_convolution(sizes, silu, past):
    call = one_request("causal_conv1d", sizes, past, silu=silu)
    x, weight, bias = (call.arguments[name] for name in ("x", "weight", "bias"))
    before = initial(call)
    head = torch.zeros(1, sizes[0], sizes[1] - 1) if before is None else before
    whole = torch.cat([head, x.T[None]], 2)
    expected = F.conv1d(whole, weight[:, None], bias, groups=sizes[0])[0].T
    state = whole[0, :, whole.shape[2] - (sizes[1] - 1) :]
    assert_same(call, before if sizes[1] > 1 else None, F.silu(expected) if silu else expected, state)


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("sizes", [sizes for sizes in SIZES["selective_scan"] if not sizes[1]], ids=str)
def test_selective_scan_is_that_of_mamba(sizes, optional):
    call = one_request("selective_scan", sizes, 0, optional=optional)
    # There [1, I, T] and [1, n, T].
    x, dt, B, C = (tensor.transpose(1, 2) for tensor in rows_of(call, "x", "dt", "B", "C"))
    output, state = mamba_selective_scan(x, dt, call.arguments["A"], B, C, call.arguments["D"], return_last_state=True)
    assert_same(call, None, output[0].T, state[0])


def test_selective_scan_of_groups_is_one_scan_for_each():
    call = one_request("selective_scan", (34, 2, 16), 50)
    whole = call.to(torch.float32)
    output = whole.run(state_reference)
    for group in (0, 1):
        channels = slice(17 * group, 17 * (group + 1))
        part = call.replaced(
            **{name: call.arguments[name][:, channels] for name in ("x", "dt", "state_pool")},
            **{name: call.arguments[name][channels] for name in ("A", "D")},
            **{name: call.arguments[name][:, group] for name in ("B", "C")},
        )
        torch.testing.assert_close(part.run(state_reference), output[:, channels])
    torch.testing.assert_close(call.pool, whole.pool, equal_nan=True)


@pytest.mark.parametrize("past", [0, 50])
@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("sizes", SIZES["ssd"], ids=str)
def test_ssd_is_that_of_mamba2(sizes, optional, past):
    call = one_request("ssd", sizes, past, optional=optional)
    before = initial(call)
    output, state = mamba2_chunk_scan(
        *rows_of(call, "x", "dt"),
        call.arguments["A"],
        *rows_of(call, "B", "C"),
        chunk_size=8,
        D=call.arguments["D"],
        initial_states=before,
        return_final_states=True,
    )
    assert_same(call, before, output[0], state[0])


def test_ssd_is_linear_attention_with_a_fixed_decay():
    """As Lightning Attention: out_i = sum over j <= i of exp(A * (i - j)) * (q_i . k_j) * v_j."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(ROWS, 3, 16, generator=generator) for _ in range(2))
    value, A = torch.randn(ROWS, 3, 24, generator=generator), -torch.rand(3, generator=generator)
    distance = torch.arange(ROWS)[:, None] - torch.arange(ROWS)
    weight = torch.exp(A[:, None, None] * distance).masked_fill(distance < 0, 0.0)
    expected = torch.einsum("hij,ihd,jhd,jhv->ihv", weight, query, key, value)
    bounds = torch.tensor([0, ROWS], dtype=torch.int32)
    output = state_reference.ssd(value, torch.ones(ROWS, 3), A, key, query, None, None, bounds, None, None)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("past", [0, 50])
@pytest.mark.parametrize("sizes", SIZES["gated_delta_rule"], ids=str)
def test_gated_delta_rule_is_that_of_qwen3_next_and_kimi(sizes, past):
    call = one_request("gated_delta_rule", sizes, past)
    before = initial(call)
    # Those scale the query by its size, and ours by what it is given.
    call = call.replaced(scale=sizes[2] ** -0.5)
    theirs = chunk_kimi_delta_attention if sizes[4] else torch_chunk_gated_delta_rule
    output, state = theirs(
        *rows_of(call, "query", "key", "value", "decay", "beta"),
        chunk_size=8,
        initial_state=before,
        output_final_state=True,
    )
    assert_same(call, before, output[0], state[0])


@pytest.mark.parametrize("past", [0, 50])
def test_linear_recurrence_is_that_of_recurrent_gemma(past):
    call = one_request("linear_recurrence", (33,), past)
    (gate, update), before = rows_of(call, "decay", "update"), initial(call)
    reset = torch.zeros(1, ROWS, 1, dtype=torch.bool)
    output, state = RecurrentGemmaRglru._rnn_scan(None, update, gate, reset, before)
    assert_same(call, before, output[0], state[0])


@pytest.mark.parametrize("past", [0, 50])
def test_wkv_is_that_of_rwkv(past):
    call = one_request("wkv", (33,), past)
    before = initial(call)
    # There the logarithm of the rate stands where ours has its negative.
    rate, first = torch.log(-call.arguments["time_decay"]), call.arguments["time_first"]
    state = None if before is None else list(before.unbind(2))
    output, state = rwkv_linear_attention_cpu(rate, first, *rows_of(call, "key", "value"), state, return_state=True)
    assert_same(call, before, output[0], torch.stack(state, 2)[0])


@pytest.mark.parametrize("past", [0, 50])
@pytest.mark.parametrize("sizes", SIZES["mlstm"], ids=str)
def test_mlstm_is_that_of_xlstm(sizes, past):
    call = one_request("mlstm", sizes, past)
    before, (_, key_size, value_size) = initial(call), sizes
    # There the forget gate is given before its log-sigmoid, and the query is scaled by its size.
    forget = torch.randn(1, sizes[0], ROWS, generator=torch.Generator().manual_seed(1))
    call = call.replaced(decay=F.logsigmoid(forget)[0].T)
    heads_first = (tensor.transpose(1, 2) for tensor in rows_of(call, "query", "key", "value", "input_gate"))
    state = torch.zeros(1, sizes[0], key_size + 1, value_size + 1) if before is None else before
    output, (memory, normaliser, largest) = mlstm_recurrent_sequence_native(
        *heads_first,
        forget,
        c_initial=state[:, :, :-1, :-1],
        n_initial=state[:, :, :-1, -1],
        m_initial=state[:, :, -1:, -1],
        return_last_states=True,
        eps=1e-6,
    )
    expected = torch.zeros_like(state[0])
    expected[:, :-1, :-1], expected[:, :-1, -1], expected[:, -1:, -1] = memory[0], normaliser[0], largest[0]
    assert_same(call, before, output[0].transpose(0, 1), expected)


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_cut_of_the_requests_equals_the_whole(op, data):
    case = data.draw(any_case(op))
    call = make_call(case, torch.float64, seed=data.draw(st.integers(0, 9))).to(torch.float64)
    whole = call.to(torch.float64)
    expected, bounds = whole.run(state_reference), call.arguments["cu_seqlens_q"].tolist()
    done, got = [0] * len(case.requests), torch.zeros_like(expected)
    while any(count > steps for (count, _), steps in zip(case.requests, done, strict=True)):
        counts = [
            data.draw(st.integers(0, count - steps)) for (count, _), steps in zip(case.requests, done, strict=True)
        ]
        index = [bounds[n] + done[n] + i for n, count in enumerate(counts) for i in range(count)]
        done = [steps + count for steps, count in zip(done, counts, strict=True)]
        per_row = {
            name: value[index]
            for name, value in call.arguments.items()
            if isinstance(value, Tensor) and name not in PARAMETERS
        }
        contexts = [past + steps for (_, past), steps in zip(case.requests, done, strict=True)]
        step = call.replaced(
            **per_row,
            cu_seqlens_q=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
        )
        got[index] = step.run(state_reference)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(call.pool, whole.pool, equal_nan=True)


PARAMETERS = ("weight", "bias", "A", "D", "time_decay", "time_first", "state_pool", "state_slots")
PARAMETERS += ("cu_seqlens_q", "context_lens")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_the_slots_of_requests_with_rows_change(case):
    call = make_call(case, torch.float32)
    before = call.pool.clone()
    output = call.run(state_reference)
    used, slots = int(call.arguments["cu_seqlens_q"][-1]), call.arguments["state_slots"]
    written = {int(slots[n]) for n, (rows, _) in enumerate(case.requests) if rows}
    for slot in range(len(before)):
        # NaN stays where nothing was written; a fresh request's slot held NaN, and does not any more.
        same = torch.equal(before[slot].nan_to_num(7.0), call.pool[slot].nan_to_num(7.0))
        assert same == (slot not in written) or not before[slot].numel()
        assert slot not in written or call.pool[slot].isfinite().all()
    assert output[:used].isfinite().all()
    assert output[used:].eq(0).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_a_pool_every_request_is_fresh(case):
    call = make_call(case, torch.float32)
    rows = call.arguments["cu_seqlens_q"].diff()
    expected = call.replaced(context_lens=rows).run(state_reference)
    assert torch.equal(call.fresh().run(state_reference), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_half_precision_is_computed_in_float32_and_rounded_once(op, wide, dtype):
    call = make_call(StateCase(op=op, name="", sizes=SIZES[op][0], wide=wide), dtype)
    widened = call.to(torch.float32)
    expected, output = widened.run(state_reference), call.run(state_reference)
    assert output.dtype == dtype
    assert torch.equal(output, expected.to(dtype))
    torch.testing.assert_close(call.pool, widened.pool.to(call.pool.dtype), rtol=0, atol=0, equal_nan=True)


def test_float64_is_computed_in_float64():
    call = make_call(StateCase(op="ssd", name="", sizes=SIZES["ssd"][0]), torch.float32)
    output, _ = exact(call)
    assert output.dtype == torch.float64
    assert not torch.equal(output, output.float().double())
