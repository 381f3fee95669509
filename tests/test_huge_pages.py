import gc
import mmap
import re
from pathlib import Path

import pytest
import torch

from selective_compile import huge_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(3, 5), (40, 2, 16, 4096), (0, 4)])
def test_zeros_of_the_shape_and_dtype_that_can_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = huge_pages.zeros(shape, dtype)
    assert made.shape == shape and made.dtype == dtype and made.is_contiguous()
    assert not made.count_nonzero()
    made.fill_(1)
    assert made.sum(dtype=torch.float64) == made.numel()


def test_the_system_is_asked_for_huge_pages() -> None:
    smaps = Path("/proc/self/smaps")
    if not hasattr(mmap, "MADV_HUGEPAGE") or not smaps.exists():
        pytest.skip("huge pages are asked for on Linux only")
    made = huge_pages.zeros((8, huge_pages.HUGE_PAGE), torch.int8)
    flags = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:(.*?)$", smaps.read_text(), re.MULTILINE | re.DOTALL)
    held = [f for begin, end, f in flags if int(begin, 16) <= made.data_ptr() < int(end, 16)]
    assert len(held) == 1 and " hg" in held[0]


def test_what_the_kernel_does_not_know_is_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError

    monkeypatch.setattr(huge_pages.mmap, "mmap", Refused)
    assert huge_pages.zeros((2, huge_pages.HUGE_PAGE), torch.int8).shape == (2, huge_pages.HUGE_PAGE)


def test_what_is_too_large_is_told_by_torch() -> None:
    with pytest.raises(RuntimeError, match=str(2**50)):
        huge_pages.zeros((2**50,), torch.int8)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the process's own size is read from /proc")
def test_the_memory_goes_with_the_tensor() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    size = 2**30
    before = mapped()
    view = huge_pages.zeros((size,), torch.int8)[5:]
    assert mapped() >= before + size // 2
    del view
    gc.collect()
    assert mapped() < before + size // 2
