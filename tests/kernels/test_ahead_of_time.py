"""What is looked for in kernels that are compiled ahead of time is found there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.kernels import ahead_of_time as ahead

REACHING = (
    "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];",
    "@%p1 ld.global.nc.L1::no_allocate.L2::cache_hint.b32 %r1, [%rd1], %rd2;",
    "ld.acquire.gpu.global.b32 %r1, [%rd1];",
    "ld.volatile.b32 %r1, [%rd1];",
    "st.global.b32 [%rd1], %r1;",
    "red.global.add.f32 [%rd1], %f1;",
    "red.relaxed.gpu.global.add.s32 [%rd1], %r1;",
    "atom.acq_rel.gpu.global.add.s32 %r1, [%rd1], 1;",
    "multimem.red.relaxed.sys.global.add.f32 [%rd1], %f1;",
    "cp.async.ca.shared.global [%r1], [%rd1], 0x10, %r2;",
    "@%p1 cp.async.cg.shared.global [%r1], [%rd1], 0x10;",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], %r2, [%r3];",
    "@%p1 cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r3];",
    "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3];",
    "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd1, {%r1, %r2}];",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], %r2;",
    "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%rd1, {%r1}], [%r2];",
    "prefetch.global.L2 [%rd1];",
    "prefetch.L1 [%rd1];",
    "prefetchu.L1 [%rd1];",
    "discard.global.L2 [%rd1], 128;",
    "tensormap.replace.tile.global_address.global.b1024.b64 [%rd1], %rd2;",
    "suld.b.1d.b32.trap %r1, [%rd1, {%r2}];",
    "call.uni (%r1), vprintf, (%rd1, %rd2);",
    "call (%r1), anything, (%rd1);",
)
OWN = (
    "ld.param.b64 %rd1, [_attention_kernel_param_0];",
    "ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];",
    "st.shared::cta.b32 [%r1], %r2;",
    "ld.local.b32 %r1, [%rd1];",
    "atom.shared.add.u32 %r1, [%r2], 1;",
    "redux.sync.add.s32 %r1, %r2, -1;",
    "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r2};",
    "cp.async.commit_group;",
    "cp.async.wait_group 0x0;",
    "cp.async.bulk.wait_group.read 0;",
    "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];",
    "mbarrier.init.shared::cta.b64 [%r1], 1;",
    "fence.proxy.async.shared::cta;",
    "mov.b64 %rd1, global_scratch;",
    ".reg .b32 %ld<3>;",
)


def early(before: str, behind: str = "") -> SimpleNamespace:
    text = f"{before}\n\tgriddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;\n{behind}\n\tret;\n"
    return SimpleNamespace(asm={"ptx": text}, metadata=SimpleNamespace(launch_pdl=True))


@pytest.mark.parametrize("instruction", REACHING)
def test_what_reaches_memory_before_waiting_is_found(instruction: str) -> None:
    assert len(ahead.global_accesses(f"\t{instruction}\n")) == 1
    with pytest.raises(AssertionError):
        ahead.assert_waits(early(f"\t{instruction}"))
    ahead.assert_waits(early("", behind=f"\t{instruction}"))


def test_what_reads_past_the_first_level_cache_may_come_first() -> None:
    ahead.assert_waits(early("\tld.global.cg.b32 { %r1 }, [ %rd1 + 0 ];"))
    ahead.assert_waits(early("\t@%p1 cp.async.bulk.prefetch.L2.global [%rd1], %r2;"))


@pytest.mark.parametrize("instruction", OWN)
def test_what_reaches_no_other_kernels_memory_may_come_first(instruction: str) -> None:
    ahead.assert_waits(early(f"\t{instruction}"))


@pytest.mark.parametrize("instruction", ["ret;", "@%p1 ret;", "griddepcontrol.launch_dependents;"])
def test_nothing_ends_before_it_has_waited(instruction: str) -> None:
    with pytest.raises(AssertionError):
        ahead.assert_waits(early(f"\t{instruction}"))
