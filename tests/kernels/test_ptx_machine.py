"""The machine that runs PTX: numbers as the ISA has them, and programs whose mistakes it is to find."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
arithmetic = pytest.importorskip("tests.kernels.ptx.arithmetic")
formats = pytest.importorskip("tests.kernels.ptx.formats")
machines = pytest.importorskip("tests.kernels.ptx.machine")
memories = pytest.importorskip("tests.kernels.ptx.memory")
readings = pytest.importorskip("tests.kernels.ptx.reading")
steps = pytest.importorskip("tests.kernels.ptx.steps")
Fault, Order = memories.Fault, machines.Order

HEAD = """.visible .entry _kernel(
	.param .u64 .ptr .global .align 1 _kernel_param_0,
	.param .u64 .ptr .global .align 1 _kernel_param_1
)
.reqntid {threads}
{{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<99>;
	.reg .b64 	%rd<9>;
	ld.param.b64 	%rd1, [_kernel_param_0];
	ld.param.b64 	%rd2, [_kernel_param_1];
	mov.u32 	%r1, %tid.x;
	mad.wide.u32 	%rd3, %r1, 4, %rd1;
	mad.wide.u32 	%rd4, %r1, 4, %rd2;
{body}
	ret;
                                        // -- End function
}}
"""


def run(body: str, given: torch.Tensor, *, threads: int = 64, programs: int = 1, **order: bool) -> torch.Tensor:
    """What a program makes of a tensor: its threads' addresses in it are in `%rd3`, those of the result in `%rd4`."""
    read = readings.program(HEAD.format(threads=threads, body=body))
    memory, result = memories.Memory(), torch.full((threads,), -1, dtype=torch.int32)
    parameters = {
        name: struct.pack("Q", memory.address(tensor))
        for name, tensor in zip(read.parameters, (given, result), strict=True)
    }
    shape = (read, (programs, 1, 1), memory, parameters, {})
    with np.errstate(all="ignore"):
        machines.Machine(*shape, shared=4096, order=Order(**order)).run(steps.steps_of(read))
    return result


NUMBERS = torch.arange(64, dtype=torch.int32)
# Each thread hands its number to another one of the 64, through shared memory.
ACROSS = """
	ld.global.b32 { %r2 }, [ %rd3 + 0 ];
	mov.b32 %r3, global_smem;
	shl.b32 %r4, %r1, 2;
	add.s32 %r5, %r3, %r4;
	st.shared.b32 [%r5], %r2;
	BARRIER
	xor.b32 %r6, %r4, 252;
	add.s32 %r7, %r3, %r6;
	ld.shared.b32 %r8, [%r7];
	st.global.b32 [ %rd4 + 0 ], { %r8 };
"""
COPIED = """
	mov.b32 %r3, global_smem;
	shl.b32 %r4, %r1, 2;
	add.s32 %r5, %r3, %r4;
	mov.b32 %r6, 4;
	cp.async.ca.shared.global [ %r5 + 0 ], [ %rd3 + 0 ], 0x4, %r6;
	cp.async.commit_group;
	WAIT
	ld.shared.b32 %r8, [%r5];
	st.global.b32 [ %rd4 + 0 ], { %r8 };
"""


@pytest.mark.parametrize("in_turn", (False, True))
def test_threads_exchange_numbers_through_shared_memory(in_turn):
    body = ACROSS.replace("BARRIER", "bar.sync 0;")
    assert torch.equal(run(body, NUMBERS, in_turn=in_turn), NUMBERS.flip(0))


def test_what_misses_a_barrier_shows_where_warps_run_in_turn():
    body = ACROSS.replace("BARRIER", "")
    assert not torch.equal(run(body, NUMBERS, in_turn=True), NUMBERS.flip(0))


@pytest.mark.parametrize("early", (False, True))
def test_a_copy_is_there_when_it_is_waited_for(early):
    body = COPIED.replace("WAIT", "cp.async.wait_group 0;")
    assert torch.equal(run(body, NUMBERS, copies_early=early), NUMBERS)


def test_a_copy_that_is_not_waited_for_shows_where_copies_are_late():
    with pytest.raises(Fault, match="before its copies"):
        run(COPIED.replace("WAIT", ""), NUMBERS)


def test_what_is_not_read_of_a_copy_is_nothing():
    body = COPIED.replace("mov.b32 %r6, 4", "selp.b32 %r6, 4, 0, %p1").replace("WAIT", "cp.async.wait_group 0;")
    found = run("\tsetp.lt.u32 %p1, %r1, 7;\n" + body, NUMBERS)
    assert torch.equal(found, torch.where(NUMBERS < 7, NUMBERS, 0))


WRONG = {
    "outside of every tensor": "ld.global.b32 { %r2 }, [ %rd3 + 4 ];",
    "does not begin at a multiple": "ld.global.b32 { %r2 }, [ %rd3 + 2 ];",
    "outside of shared memory": "mov.b32 %r3, global_smem; ld.shared.b32 %r2, [%r3+4096];",
    "others of their program that never come": "setp.lt.u32 %p1, %r1, 32; @%p1 bra $L__BB0_1; bar.sync 0;"
    " $L__BB0_1: bar.sync 1;",
    "only a part of a warp": "setp.lt.u32 %p1, %r1, 3; @%p1 shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;",
    "that does not come": """
	{
	.reg .pred complete;
	mov.b32 %r3, global_smem;
	setp.eq.s32 %p1, %r1, 0;
	@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
	bar.sync 0;
	mov.b32 %r2, 0;
	waitLoop:
	mbarrier.try_wait.parity.shared::cta.b64 complete, [%r3], %r2;
	@!complete bra.uni waitLoop;
	}""",
}


@pytest.mark.parametrize("said", WRONG)
def test_mistakes_are_errors(said):
    body = WRONG[said].replace(" $L__BB0_1: ", "\n$L__BB0_1:\n")
    with pytest.raises(Fault, match=said):
        run(body, NUMBERS)


PRODUCT = """
	mov.b32 %r3, global_smem;
	shl.b32 %r4, %r1, 2;
	add.s32 %r5, %r3, %r4;
	mov.b32 %r6, 0;
	st.shared.b32 [%r5], %r6;
	st.shared.b32 [%r5+512], %r6;
	FENCE
	bar.sync 0;
	bfe.u32 %r7, %r3, 4, 14;
	cvt.u64.u32 %rd5, %r7;
	or.b64 %rd6, %rd5, 34359738368;
	mov.b32 %r10, 0f3F800000;
	mov.b32 %r11, %r10;
	mov.b32 %r12, %r10;
	mov.b32 %r13, %r10;
	mov.b32 %r20, %r6;
	mov.b32 %r21, %r6;
	mov.b32 %r22, %r6;
	mov.b32 %r23, %r6;
	mov.pred %p2, -1;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r10,%r11,%r12,%r13}, {%r20,%r21,%r22,%r23}, %rd6,%p2,1,1,0;
	wgmma.commit_group.sync.aligned;
	BESIDE
	wgmma.wait_group.sync.aligned 0;
	add.f32 %r40, %r10, %r30;
	st.global.b32 [ %rd4 + 0 ], { %r10 };
"""


@pytest.mark.parametrize("early", (False, True))
def test_a_product_adds_to_registers(early):
    body = PRODUCT.replace("FENCE", "fence.proxy.async.shared::cta;").replace("BESIDE", "")
    found = run(body, torch.zeros(128), threads=128, products_early=early)
    assert torch.equal(found.view(torch.float32), torch.ones(128))


def test_registers_of_a_product_under_way_are_not_written():
    body = PRODUCT.replace("FENCE", "fence.proxy.async.shared::cta;")
    for register in ("%r10", "%r21"):
        with pytest.raises(Fault, match="is written"):
            run(body.replace("BESIDE", f"mov.b32 {register}, %r1;"), torch.zeros(128), threads=128)


def test_what_is_read_of_a_product_under_way_is_nan():
    body = PRODUCT.replace("FENCE", "fence.proxy.async.shared::cta;").replace("BESIDE", "mov.b32 %r30, %r10;")
    body = body.replace("{ %r10 }", "{ %r40 }")
    assert run(body, torch.zeros(128), threads=128).view(torch.float32).isnan().all()


def test_a_product_of_what_no_fence_is_behind():
    body = PRODUCT.replace("FENCE", "").replace("BESIDE", "")
    with pytest.raises(Fault, match="without a fence"):
        run(body, torch.zeros(128), threads=128)


ANY = st.integers(0, 2**32 - 1)


@given(a=ANY, b=ANY, by=st.integers(0, 40), count=st.integers(1, 32))
def test_whole_numbers(a, b, by, count):
    def of(name: str, *numbers: int, kind: str = "u4") -> int:
        given = [np.array([n], np.uint32).view(kind) for n in numbers]
        return int(arithmetic.OPERATIONS[name](*given)[0])

    signed = [n - 2**32 if n >= 2**31 else n for n in (a, b)]
    assert of("shl", a, by) == (a << by) % 2**32 and of("shr", a, by) == a >> by
    assert of("shr", a, by, kind="i4") == signed[0] >> by
    assert of("mul.hi", a, b) == a * b >> 32 and of("mul.lo", a, b) == a * b % 2**32
    assert of("bfe", a, by % 32, count) == (a >> by % 32) & (2**count - 1)
    if b:
        assert of("div", a, b) == a // b
        assert of("div", a, b, kind="i4") == int(abs(signed[0]) // abs(signed[1])) * (
            1 if (signed[0] < 0) == (signed[1] < 0) else -1
        ) or (signed == [-(2**31), -1])
    both = struct.pack("II", a, b)
    chosen = [by % 8, count % 8, (by + count) % 8, by * count % 8]
    selector = sum(n << 4 * place for place, n in enumerate(chosen))
    assert of("prmt", a, b, selector) == int.from_bytes(bytes(both[n] for n in chosen), "little")


@given(numbers=st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_numbers_of_16_and_8_bits(numbers):
    given = torch.tensor(numbers)
    for kind, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        with np.errstate(over="ignore"):
            bits = formats.encoded(given.numpy(), kind)
        found = torch.from_numpy(formats.decoded(bits, kind).astype(np.float32))
        torch.testing.assert_close(found, given.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


def test_a_number_of_8_bits_is_what_torch_takes_it_for():
    bits = torch.arange(256, dtype=torch.uint8)
    found = torch.from_numpy(formats.decoded(bits.numpy(), "e4m3"))
    torch.testing.assert_close(found, bits.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)
