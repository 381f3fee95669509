"""The machine that runs PTX: numbers as the ISA has them, and programs whose mistakes it is to find."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
accesses = pytest.importorskip("tests.kernels.ptx.accesses")
arithmetic = pytest.importorskip("tests.kernels.ptx.arithmetic")
formats = pytest.importorskip("tests.kernels.ptx.formats")
machines = pytest.importorskip("tests.kernels.ptx.machine")
memories = pytest.importorskip("tests.kernels.ptx.memory")
readings = pytest.importorskip("tests.kernels.ptx.reading")
steps = pytest.importorskip("tests.kernels.ptx.steps")
Fault = accesses.Fault

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


def run(
    body: str, given: torch.Tensor, *, threads: int = 64, programs: int = 1, early: bool = False, in_front: int = 0
) -> torch.Tensor:
    """What a program makes of a tensor: its threads' addresses in it are in `%rd3`, those of the result in `%rd4`.

    in_front: so many of the tensor's last numbers were written by the kernel in front.
    """
    read = readings.program(HEAD.format(threads=threads, body=body))
    name = given.untyped_storage().data_ptr(), given.untyped_storage().nbytes()
    written = np.arange(given.nbytes) >= given.nbytes - 4 * in_front
    memory, result = memories.Memory({name: written}), torch.full((threads,), -1, dtype=torch.int32)
    parameters = {
        name: struct.pack("Q", memory.address(tensor))
        for name, tensor in zip(read.parameters, (given, result), strict=True)
    }
    shape = (read, (programs, 1, 1), memory, parameters, {})
    with np.errstate(all="ignore"):
        machines.Machine(*shape, shared=4096, early=early).run(steps.steps_of(read))
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


def test_threads_exchange_numbers_through_shared_memory():
    body = ACROSS.replace("BARRIER", "bar.sync 0;")
    assert torch.equal(run(body, NUMBERS), NUMBERS.flip(0))


# Each warp reads what the other one writes, only the first does, only the second does.
@pytest.mark.parametrize("apart", ("", "setp.ge.u32 %p1, %r1, 32;", "setp.lt.u32 %p1, %r1, 32;"))
def test_what_misses_a_barrier(apart):
    own = f"{apart}\n\tselp.b32 %r6, %r4, %r6, %p1;" if apart else ""
    body = ACROSS.replace("BARRIER", "").replace("add.s32 %r7", f"{own}\n\tadd.s32 %r7")
    with pytest.raises(Fault, match="reads what another one has written, and no barrier"):
        run(body, NUMBERS)


def test_what_is_written_over_too_early():
    body = ACROSS.replace("BARRIER", "bar.sync 0;") + "\n\tst.shared.b32 [%r5], %r3;"
    with pytest.raises(Fault, match="writes over what another one has read"):
        run(body, NUMBERS)
    assert torch.equal(
        run(body.replace("\n\tst.shared.b32 [%r5], %r3", "\n\tbar.sync 0;\n\tst.shared.b32 [%r5], %r3"), NUMBERS),
        NUMBERS.flip(0),
    )


def test_warps_may_write_one_number_that_all_of_them_have_and_no_others():
    same = "\tmov.b32 %r3, global_smem; mov.b32 %r4, 7; st.shared.b32 [%r3], %r4; bar.sync 0; ld.shared.b32 %r8, [%r3];"
    body = same + " st.global.b32 [ %rd4 + 0 ], { %r8 };"
    assert torch.equal(run(body, NUMBERS), torch.full((64,), 7, dtype=torch.int32))
    with pytest.raises(Fault, match="warps write different numbers"):
        run(body.replace("%r4, 7", "%r4, %r1"), NUMBERS)


def test_programs_of_a_launch_do_not_meet_in_memory():
    body = "\tmov.u32 %r2, %ctaid.x; ld.global.b32 { %r3 }, [ %rd4 + 0 ]; st.global.b32 [ %rd4 + 0 ], { %r2 };"
    run(body, NUMBERS)
    with pytest.raises(Fault):
        run(body, NUMBERS, programs=2)


def test_memory_is_not_reached_before_the_kernels_in_front_have_ended():
    body = "ld.global.b32 { %r2 }, [ %rd3 + 0 ]; st.global.b32 [ %rd4 + 0 ], { %r2 };"
    with pytest.raises(Fault, match="before the kernels in front"):
        run(f"\t{body}", NUMBERS, early=True)
    assert torch.equal(run(f"\tgriddepcontrol.wait; {body}", NUMBERS, early=True), NUMBERS)


def test_what_others_wrote_than_the_kernel_in_front_may_be_read_past_the_cache_before_it_has_ended():
    body = "ld.global.cg.b32 { %r2 }, [ %rd3 + 0 ]; griddepcontrol.wait; st.global.b32 [ %rd4 + 0 ], { %r2 };"
    assert torch.equal(run(f"\t{body}", NUMBERS, early=True), NUMBERS)
    with pytest.raises(Fault, match="what the kernel in front writes is read"):
        run(f"\t{body}", NUMBERS, early=True, in_front=1)
    waits = f"\tgriddepcontrol.wait; {body}"
    assert torch.equal(run(waits, NUMBERS, early=True, in_front=1), NUMBERS)


def test_a_copy_is_there_when_it_is_waited_for():
    assert torch.equal(run(COPIED.replace("WAIT", "cp.async.wait_group 0;"), NUMBERS), NUMBERS)


@pytest.mark.parametrize("wait", ("", "cp.async.wait_group 1;"))
def test_a_copy_that_is_not_waited_for(wait):
    with pytest.raises(Fault, match="reads what a copy is under way to"):
        run(COPIED.replace("WAIT", wait), NUMBERS)


def test_what_is_copied_to_where_others_still_read():
    first = ACROSS.replace("BARRIER", "bar.sync 0;").replace("st.global.b32 [ %rd4 + 0 ], { %r8 };", "")
    again = COPIED.replace("WAIT", "cp.async.wait_group 0;")
    with pytest.raises(Fault, match="writes over what another one has read"):
        run(first + again, NUMBERS)
    assert torch.equal(run(first + "\tbar.sync 0;" + again, NUMBERS), NUMBERS)


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
	BEGIN
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r10,%r11,%r12,%r13}, {%r20,%r21,%r22,%r23}, %rd6,%p2,1,1,0;
	wgmma.commit_group.sync.aligned;
	BESIDE
	wgmma.wait_group.sync.aligned 0;
	add.f32 %r40, %r10, %r30;
	st.global.b32 [ %rd4 + 0 ], { %r10 };
"""


PARTS = {
    "FENCE": "fence.proxy.async.shared::cta;",
    "BEGIN": "wgmma.fence.sync.aligned;",
    "BESIDE": "",
    "bar.sync 0;": "bar.sync 0;",
}


def product(instead: dict[str, str]) -> torch.Tensor:
    body = PRODUCT
    for name, part in (PARTS | instead).items():
        assert name in body
        body = body.replace(name, part)
    return run(body, torch.zeros(128), threads=128).view(torch.float32)


def test_a_product_adds_to_registers():
    assert torch.equal(product({}), torch.ones(128))


SOME = "setp.lt.u32 %p3, %r1, {}; @%p3 "
WRONG_PRODUCTS: dict[str, list[dict[str, str]]] = {
    "is written": [{"BESIDE": f"mov.b32 {register}, %r1;"} for register in ("%r10", "%r21")],
    "without a fence": [
        {"FENCE": ""},
        {"FENCE": SOME.format(1) + PARTS["FENCE"]},
        {"FENCE": "setp.ge.u32 %p3, %r1, 32; @%p3 " + PARTS["FENCE"]},
    ],
    "no barrier": [{"bar.sync 0;": ""}],
    "written since the last fence": [
        {"BEGIN": f"{before} add.s32 {register}, %r6, 0;"}
        for before in ("", PARTS["BEGIN"])
        for register in ("%r10", "%r21")
    ],
    "only some of four warps": [{"wgmma.mma_async": SOME.format(64) + "wgmma.mma_async"}],
    "a product under way reads": [
        {"BESIDE": "st.shared.b32 [%r5], %r1;"},
        {"BESIDE": "cp.async.ca.shared.global [ %r5 + 0 ], [ %rd3 + 0 ], 0x4;"},
    ],
    "before its copies or products": [
        {"wgmma.wait_group.sync.aligned 0;": ""},
        {"wait_group.sync.aligned 0": "wait_group.sync.aligned 1"},
    ],
}


@pytest.mark.parametrize(("said", "instead"), [(said, each) for said, all_ in WRONG_PRODUCTS.items() for each in all_])
def test_mistakes_around_products_are_errors(said, instead):
    with pytest.raises(Fault, match=said):
        product(instead)


@pytest.mark.parametrize("fence", ("fence.acq_rel.cta;", "fence.proxy.alias;", "fence.proxy.async.global;"))
def test_other_fences_are_not_taken_for_that_of_products(fence):
    with pytest.raises(NotImplementedError, match="fence"):
        product({"FENCE": fence})


def test_what_is_read_of_a_product_under_way_is_nan():
    assert product({"BESIDE": "mov.b32 %r30, %r10;", "{ %r10 }": "{ %r40 }"}).isnan().all()


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
    assert of("bfe", a, by, count) == (a >> by) & (2**count - 1)
    top = a >> min(by + count - 1, 31) & 1
    inside = min(count, max(32 - by, 0))
    field = a >> by & (2**inside - 1)
    assert of("bfe", a, by, count, kind="i4") == field - (top << inside)
    taken = (2**count - 1) << by & (2**32 - 1)
    assert of("bfi", a, b, by, count) == b & ~taken | a << by & taken
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


def floats(name: str, *numbers: float, program: str = "st.global.b32 [ %rd4 + 0 ], { %r8 };") -> torch.Tensor:
    """What an instruction makes of each, as bits."""
    given = torch.zeros(64)
    given[: len(numbers)] = torch.tensor(numbers)
    return run(f"\tld.global.b32 {{ %r2 }}, [ %rd3 + 0 ]; {name} %r8, %r2; {program}", given)[: len(numbers)]


def test_numbers_become_whole_ones_as_the_isa_has_it():
    given = (float("nan"), 3e9, -3e9, 2.5, -1.5)
    assert floats("cvt.rzi.s32.f32", *given).tolist() == [0, 2**31 - 1, -(2**31), 2, -1]
    assert floats("cvt.rmi.s32.f32", *given).tolist() == [0, 2**31 - 1, -(2**31), 2, -2]
    assert floats("cvt.rni.s32.f32", *given).tolist() == [0, 2**31 - 1, -(2**31), 2, -2]
    assert floats("cvt.rzi.u32.f32", -5.0, 5e9).tolist() == [0, -1]
    assert floats("cvt.rpi.f32.f32", 2.5, -1.5).view(torch.float32).tolist() == [3.0, -1.0]
    assert floats("ex2.approx.ftz.f32", -130.0, -1.0).view(torch.float32).tolist() == [0.0, 0.5]


@pytest.mark.parametrize(
    "name", ("cvt.rz.f16.f32", "cvt.sat.f32.f32", "add.rz.f32", "add.sat.f32", "bfe.u64", "setp.lt.and.s32", "clz.b32")
)
def test_what_is_not_known_is_said_when_it_is_read(name):
    with pytest.raises(NotImplementedError, match=name):
        run(f"\t{name} %r8, %r2, %r3, %r4;", NUMBERS)


def test_threads_of_a_warp_are_numbered_from_0_to_31():
    end = "st.global.b32 [ %rd4 + 0 ], { %r8 };"
    assert run(f"\tmov.b32 %r3, %laneid; shfl.sync.idx.b32 %r8, %r3, 33, 31, -1; {end}", NUMBERS).eq(1).all()
    found = run(f"\tshfl.sync.down.b32 %r8|%p1, %r1, 16, 31, -1; selp.b32 %r8, %r8, 99, %p1; {end}", NUMBERS)
    lane = NUMBERS % 32
    assert torch.equal(found, torch.where(lane < 16, NUMBERS + 16, 99))
