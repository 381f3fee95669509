"""Tokens that the kernel chooses are those of its definition, `runtime.device_draw.choose` in PyTorch's operators."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from selective_compile.kernels import choose_candidates_triton, choose_parts_triton, choose_triton
from selective_compile.kernels.interpreter import interpreted
from selective_compile.kernels.registers import warps
from selective_compile.runtime.device_draw import NO_TOKEN, choices, choose
from selective_compile.runtime.token_marks import BANNED, SEEN
from tests.kernels import ahead_of_time as ahead
from tests.runtime.test_device_draw import PARAMS, asked
from tests.runtime.test_sampler import GREEDY, random_logits

BLOCK = choose_triton.BLOCK
SAMPLED = dataclasses.replace(GREEDY, do_sample=True, seed=3)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a row has several of them."""
    monkeypatch.setattr(choose_triton, "BLOCK", 64)


@pytest.fixture
def triton_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the test alone: whatever is compiled is compiled by it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


def both(logits: Tensor, params: Any, marks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The tokens by the definition and by the kernel; the rows' marks are the first."""
    found = choices(params, list(range(len(params))))
    fields = torch.zeros(6, len(params), dtype=torch.float64) if found is None else torch.from_numpy(found)
    slots = None if marks is None else torch.arange(len(params)).flip(0)
    wanted = choose(logits, fields, None if marks is None else marks[slots])
    return wanted, choose_triton.choose(logits, fields, marks, slots, no_token=NO_TOKEN)


@settings(max_examples=30, deadline=None)
@given(
    wanted=st.lists(PARAMS, min_size=1, max_size=4),
    vocabulary=st.integers(2, 300),
    seed=st.integers(0, 2**31),
    ties=st.booleans(),
    marked=st.booleans(),
    room=st.sampled_from([3, 40, 300]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_rows_have_the_tokens_of_the_definition(
    wanted: list[dict[str, Any]], vocabulary: int, seed: int, ties: bool, marked: bool, room: int, dtype: torch.dtype
) -> None:
    """Whether there is room for all that may be left or not."""
    params = asked(wanted, vocabulary)
    logits = random_logits(len(params), vocabulary, seed, ties).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.rand(len(params) + 1, vocabulary, generator=generator) < 0.2 for _ in range(2)]
    marks = drawn[0] * SEEN + drawn[1].to(torch.uint8) * BANNED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_triton, "ROOM", room)
        expected, found = both(logits, params, marks.clone() if marked else None)
    assert found.tolist() == expected.tolist()


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 4),
    vocabulary=st.integers(1, 300),
    seed=st.integers(0, 2**31),
    ties=st.booleans(),
    rare=st.sampled_from([None, float("nan"), float("inf"), -float("inf")]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_where_all_are_greedy_it_is_the_first_of_the_largest(
    count: int, vocabulary: int, seed: int, ties: bool, rare: float | None, dtype: torch.dtype
) -> None:
    """As `argmax` has it, of rows that lie apart, too: a NaN is the largest of all."""
    logits = torch.cat([random_logits(count, vocabulary, seed, ties)] * 2, dim=1).to(dtype)[:, :vocabulary]
    if rare is not None:
        share = 1.0 if rare < 0 else 0.02
        logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < share] = rare
    found = choose_triton.choose(logits, None, None, None, no_token=NO_TOKEN)
    assert found.dtype is torch.int64 and found.tolist() == choose(logits, None).tolist()


ASKED_OF_A_ROW = 5  # fields that `asked` loads


def reads_of(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many numbers each kernel reads, from now on."""
    reads: Counter[str] = Counter()
    of, running = interpreter.InterpreterBuilder.create_masked_load, [""]

    def noted(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        reads[running[0]] += int(mask.data.sum())
        return of(self, ptrs, mask, *others)

    def on_device(kernel: Any, tensor: Tensor) -> Any:
        running[0] = kernel.fn.__name__
        return interpreted(kernel)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", noted)
    for module in (choose_triton, choose_candidates_triton, choose_parts_triton):
        monkeypatch.setattr(module, "on_device", on_device)
    return reads


@pytest.mark.parametrize(
    "asked_for", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.01}, {"top_k": 40, "top_p": 0.8, "min_p": 0.01}], ids=str
)
def test_few_tokens_are_gone_over_again(asked_for: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row with few likely tokens, those that may be left: of what is behind each other token nothing is read."""
    reads = reads_of(monkeypatch)
    logits = random_logits(1, 2000) * 4
    expected, found = both(logits, [dataclasses.replace(SAMPLED, **asked_for)])
    assert found.tolist() == expected.tolist()
    assert reads["_choose_kernel"] < 2 * 40 * 130


@pytest.mark.parametrize("asked_for", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.01}], ids=str)
def test_candidates_are_looked_for_where_there_are_any(
    asked_for: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All logits are read when these are counted, and again those of the few parts that have some."""
    reads = reads_of(monkeypatch)
    logits = torch.full((1, 64 * 60), -20.0)
    logits[0, [70, 71, 2000]] = torch.tensor([2.0, 1.9, 1.8])
    expected, found = both(logits, [dataclasses.replace(SAMPLED, **asked_for)])
    assert found.tolist() == expected.tolist()
    of_parts, of_lanes = 60 * 60, 60 * 60 * choose_parts_triton.LANES * ("top_k" in asked_for)
    assert reads["_count_kernel"] == 60 * 64 + of_lanes + of_parts + 60 * ASKED_OF_A_ROW
    # What the two parts with any read, next to the others': how many candidates are in front, and the row's top.
    assert reads["_list_kernel"] == 2 * (64 + 1 + 60) + 60 * 59 // 2 + 60 * (1 + ASKED_OF_A_ROW)


ASKED = ({"top_p": 0.5}, {"top_p": 0.9}, {"min_p": 0.2}, {"top_k": 7}, {"top_k": 30, "top_p": 0.6, "min_p": 0.01})


@pytest.mark.parametrize("room", [choose_triton.ROOM, 5])
@pytest.mark.parametrize("asked_for", ASKED, ids=str)
def test_what_may_be_left_is_what_is_drawn_from(
    asked_for: dict[str, float], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is room for it and where there is not; nothing is written behind the room of a row."""
    monkeypatch.setattr(choose_triton, "ROOM", room)
    written = new_empty_in_front_of(monkeypatch, torch.int32, -7)
    logits = torch.cat([random_logits(1, 200, seed) for seed in range(6)])
    expected, found = both(logits, [dataclasses.replace(SAMPLED, seed=n, **asked_for) for n in range(6)])
    assert found.tolist() == expected.tolist()
    candidates = next(numbers for numbers in written if len(numbers) == 6 * room + 100)
    assert (candidates[6 * room :] == -7).all() and (candidates[: 6 * room] != -7).any()


def new_empty_in_front_of(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, value: int) -> list[Tensor]:
    """Tensors of that dtype that a launcher allocates have 100 numbers more behind them, of that value, as all."""
    made, new_empty = [], Tensor.new_empty

    def larger(self: Tensor, *size: int, **options: Any) -> Tensor:
        if options.get("dtype") is not dtype:
            return new_empty(self, *size, **options)
        made.append(torch.full((math.prod(size) + 100,), value, dtype=dtype))
        return made[-1][:-100].view(size)

    monkeypatch.setattr(Tensor, "new_empty", larger)
    return made


@pytest.mark.parametrize("asked_for,left", [({"top_p": 0.5}, {3, 200}), ({"top_p": 0.62, "top_k": 2}, {3})], ids=str)
def test_what_weighs_next_to_nothing_is_of_the_sum_all_the_same(asked_for: dict[str, float], left: set[int]) -> None:
    """Tokens that go before anything is compared have a fifth of it together; of the sum behind top-k they are not."""
    logits = torch.full((1, 400), math.log(4.5e-4 * 2.5))
    logits[0, [3, 200, 390]] = torch.tensor([1.0, 0.6, 0.1]).log()
    expected, found = both(
        logits.expand(12, -1), [dataclasses.replace(SAMPLED, seed=n, **asked_for) for n in range(12)]
    )
    assert found.tolist() == expected.tolist() and set(found.tolist()) == left


def test_of_tokens_that_are_likeliest_alike_a_limit_of_1_leaves_the_last() -> None:
    """1 - top_p is rounded to 1 there, so that no sum is more."""
    logits = torch.zeros(4, 60)
    logits[:, [10, 20, 30]] = 3.0
    expected, found = both(logits, [dataclasses.replace(SAMPLED, top_p=1e-9, seed=seed) for seed in range(4)])
    assert found.tolist() == expected.tolist() == [30] * 4


def test_what_is_chosen_is_marked_and_nothing_else() -> None:
    logits, marks = random_logits(3, 100), torch.full((4, 100), 0, dtype=torch.uint8)
    marks[:, 7:9] = BANNED
    _, found = both(logits, [dataclasses.replace(SAMPLED, repetition_penalty=1.2)] * 3, marks)
    wanted = torch.zeros(4, 100, dtype=torch.uint8)
    wanted[:, 7:9] = BANNED
    for slot, token in zip([2, 1, 0], found.tolist(), strict=True):
        wanted[slot, token] = SEEN
    assert torch.equal(marks, wanted)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_where_nothing_can_be_drawn(bad: float) -> None:
    logits = random_logits(2, 90)
    logits[0, 70] = bad
    expected, found = both(logits, [SAMPLED, SAMPLED])
    assert found.tolist() == expected.tolist() and found[0] == NO_TOKEN != found[1]
    assert both(logits, [GREEDY, SAMPLED])[1][0] == 70


def test_rows_that_lie_apart_and_a_row_of_one_value() -> None:
    logits = torch.zeros(3, 400)[:, :200]
    logits[1] = -torch.inf
    logits[1, 5] = 2.0
    params = [dataclasses.replace(SAMPLED, top_p=0.5), SAMPLED, dataclasses.replace(SAMPLED, top_k=3, min_p=0.9)]
    expected, found = both(logits, params)
    assert found.tolist() == expected.tolist() and found[1] == 5 and found[0] >= 100


@pytest.mark.parametrize("rare", [None, float("nan")])
def test_greedy_parts_of_several_blocks(rare: float | None) -> None:
    logits = random_logits(3, 64 * 64 * 2 + 100, 8, ties=True)
    if rare is not None:
        logits[1, 5000:5300:70] = rare
    assert choose_triton.choose(logits, None, None, None, no_token=NO_TOKEN).tolist() == choose(logits, None).tolist()


def test_rows_that_lie_one_beside_the_other() -> None:
    logits = random_logits(90, 3, 4).T
    expected, found = both(logits, [GREEDY, SAMPLED, GREEDY])
    assert found.tolist() == expected.tolist()
    assert choose_triton.choose(logits, None, None, None, no_token=NO_TOKEN).tolist() == choose(logits, None).tolist()


def test_greedy_tokens_of_float64_are_told_apart_by_all_of_its_digits() -> None:
    logits = torch.tensor([[1.0, 1.0 + 2**-40, 0.0]], dtype=torch.float64)
    assert choose_triton.choose(logits, None, None, None, no_token=NO_TOKEN).tolist() == [1]


@pytest.mark.parametrize("asked_for", [{}, {"top_p": 0.7}], ids=str)
def test_wherever_in_the_sum_it_is_drawn(asked_for: dict[str, float]) -> None:
    """At its ends, at those of parts and anywhere; with parts of which nothing can be drawn, or next to nothing."""
    logits = random_logits(1, 600, 5)
    logits[0, 64:128], logits[0, 300:330], logits[0, 512:] = -torch.inf, -60.0, -90.0
    generator = torch.Generator().manual_seed(2)
    cumulative = (logits[0].double() - logits.max()).exp().cumsum(dim=0)
    ends = cumulative[63::64] / cumulative[-1]
    fractions = torch.cat(
        [
            torch.rand(8, dtype=torch.float64, generator=generator),
            ends - 1e-5,
            ends + 1e-5,
            torch.tensor([0, 1 - 2**-53]),
        ]
    )
    fractions = fractions[(fractions >= 0) & (fractions < 1)]
    found = choices([dataclasses.replace(SAMPLED, **asked_for)], [0])
    assert found is not None
    fields = torch.from_numpy(found).repeat(1, len(fractions))
    fields[4] = fractions
    rows = logits.expand(len(fractions), -1)
    chosen = choose_triton.choose(rows, fields, None, None, no_token=NO_TOKEN)
    assert chosen.tolist() == choose(rows, fields).tolist()


LARGE: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"top_k": 40, "top_p": 0.9},
    {"top_p": 0.9},
    {"min_p": 0.1},
)


@pytest.mark.parametrize("spread", [1, 4])
def test_a_large_vocabulary_in_steps_as_long_as_a_gpu_takes_them(spread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a row's token is that which it has alone."""
    monkeypatch.setattr(choose_triton, "BLOCK", BLOCK)
    logits = (spread * random_logits(len(LARGE) + 1, 128_256)).to(torch.bfloat16)
    params = [dataclasses.replace(SAMPLED, seed=n, **each) for n, each in enumerate(LARGE)] + [GREEDY]
    listed = choices(params, list(range(len(params))))
    assert listed is not None
    fields = torch.from_numpy(listed)
    found = choose_triton.choose(logits, fields, None, None, no_token=NO_TOKEN)
    assert found.tolist() == choose(logits, fields).tolist()
    for n in (0, 3):
        alone = logits[n : n + 1], fields[:, n : n + 1].contiguous()
        assert choose_triton.choose(*alone, None, None, no_token=NO_TOKEN).item() == found[n]


def test_a_row_drawn_by_its_temperature_alone_is_gone_over_by_many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that chooses looks at one part of the row, and those that list candidates at none."""
    reads = reads_of(monkeypatch)
    logits = random_logits(1, 8000)
    expected, found = both(logits, [SAMPLED])
    assert found.tolist() == expected.tolist()
    assert 0 < reads["_choose_kernel"] <= 8192 // choose_triton.PARTS + 4 * choose_triton.PARTS
    assert reads["_count_kernel"] == reads["_list_kernel"] == 63 * ASKED_OF_A_ROW


KERNELS = {
    "parts": choose_parts_triton._part_kernel,
    "count": choose_candidates_triton._count_kernel,
    "list": choose_candidates_triton._list_kernel,
    "row": choose_triton._choose_kernel,
}


def compile_choice(kernel: Any, target: Any, **given: int | None) -> Any:
    """Arguments that are `given` are constants."""
    names = ("PARTS", "SEARCHES", "ROOM")
    constants = {"BLOCK": BLOCK, "NO_TOKEN": NO_TOKEN} | {name: getattr(choose_triton, name) for name in names}
    constants |= {"LANES": choose_parts_triton.LANES}
    types = {"tokens": "*i64", "candidates": "*i32", "logits": "*bf16", "fields": "*fp64", "marks": "*u8"}
    types |= {"slots": "*i64", "bests": "*fp32", "places": "*i32", "sums": "*fp64", "lanes": "*fp32"}
    types |= {"counts": "*i32", "leasts": "*i32", "rests": "*fp64"}
    whole = kernel is choose_triton._choose_kernel
    options = warps(choose_triton.WARPS, target.backend) if whole else {"num_warps": choose_parts_triton.PART_WARPS}
    of_kernel = {parameter.name for parameter in kernel.params}
    constants = {name: value for name, value in (constants | given).items() if name in of_kernel}
    return ahead.compile_ahead(kernel, target, types, constants, **options)


def assert_reads_eight_at_a_time(compiled: Any) -> None:
    """Of a vocabulary that is a multiple of 16, logits and marks."""
    loads = set(re.findall(r"ld\.global\S*", compiled.asm["ptx"]))
    assert any(".v4.b32" in load for load in loads) and not any(re.search(r"\.[bu](8|16)$", load) for load in loads)


GREEDILY = dict.fromkeys(("fields", "sums", "lanes", "candidates", "counts", "rests", "marks", "slots"))


@pytest.mark.parametrize("target", ahead.TARGETS, ids=str)
def test_it_ships_where_all_are_greedy(target: Any, triton_cache: None, tmp_path: Any) -> None:
    for name in ("parts", "row"):
        compiled = compile_choice(KERNELS[name], target, **GREEDILY)
        ahead.assert_ships(compiled, tmp_path)
        if name == "parts" and target.backend == "cuda":
            assert_reads_eight_at_a_time(compiled)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("target", ahead.TARGETS, ids=str)
def test_it_ships(target: Any, kernel: str, triton_cache: None, tmp_path: Any) -> None:
    compiled = compile_choice(KERNELS[kernel], target)
    ahead.assert_ships(compiled, tmp_path)
    if kernel != "row" and target.backend == "cuda":
        assert_reads_eight_at_a_time(compiled)


def test_a_vocabulary_of_one_ships(triton_cache: None) -> None:
    """Which a launch would have as a constant."""
    for kernel in KERNELS.values():
        assert compile_choice(kernel, ahead.TARGETS[1], vocabulary=1).asm["cubin"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [1, 8])  # by which top-p alone has more candidates than there is room for, or few
def test_on_a_gpu(spread: int, dtype: torch.dtype) -> None:
    asked_for = [{"top_k": 10 * n, "top_p": 1 - n / 20} for n in range(4)] + [*ASKED, {}, {"top_p": 0.999}] * 2
    params = [dataclasses.replace(SAMPLED, seed=n, **each) for n, each in enumerate(asked_for[:16])]
    found = choices(params, list(range(16)))
    assert found is not None
    fields, logits = torch.from_numpy(found), (spread * random_logits(16, 128_256)).to(dtype)
    given = logits.cuda(), fields.cuda()
    assert choose_triton.choose(*given, None, None, no_token=NO_TOKEN).tolist() == choose(logits, fields).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, choose_triton.GREEDY_ROWS, choose_triton.GREEDY_ROWS + 1])
@pytest.mark.parametrize("vocabulary", [32_000, 50_257, 128_256])
def test_greedy_on_a_gpu(vocabulary: int, count: int) -> None:
    logits = random_logits(count, vocabulary, ties=True).to(torch.bfloat16)
    logits[-1, vocabulary // 2] = torch.nan
    found = choose_triton.choose(logits.cuda(), None, None, None, no_token=NO_TOKEN)
    assert found.tolist() == choose(logits, None).tolist()
