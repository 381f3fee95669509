"""What is told of an error in the GPU benchmark: the line that says what was wrong, and where it came from."""

from __future__ import annotations

import ast
import subprocess
from typing import Any

import pytest
import torch
from triton.backends.nvidia.compiler import PTXASError
from triton.compiler.errors import CompilationError

from benchmarks.gpu_parts import failures
from benchmarks.gpu_parts.failures import FAILURES, detail, is_lost, reason, said_in

SOURCE = "def kernel(x):\n    tl.load(x, y)"
WHERE = ast.Name(lineno=2, col_offset=4)
PTXAS = """`ptxas` failed with error code 255
`ptxas` stderr:
ptxas fatal   : Value 'sm_999' is not defined for option 'gpu-name'

Repro command: /somewhere/ptxas -v --gpu-name=sm_999 /tmp/x.ptx
"""


class BackendFailed(RuntimeError):
    """As Dynamo's: its type does not end in Error."""


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except type(error) as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CompilationError(SOURCE, WHERE, "NameError('no y')"), "CompilationError: NameError('no y')"),
        (CompilationError(SOURCE, WHERE), "CompilationError: tl.load(x, y)"),
        (PTXASError(PTXAS), "PTXASError: ptxas fatal   : Value 'sm_999' is not defined for option 'gpu-name'"),
        (
            BackendFailed("backend='be' raised:\nTypeError: no such thing\n\nSet TORCHDYNAMO_VERBOSE=1 for more"),
            "TypeError: no such thing",
        ),
        (
            raised(BackendFailed("backend='be' raised:"), LookupError("the cause")),
            "BackendFailed: backend='be' raised:; LookupError: the cause",
        ),
        (
            raised(BackendFailed("backend='be' raised:"), CompilationError(SOURCE, WHERE, "AssertionError('odd')")),
            "CompilationError: AssertionError('odd')",
        ),
        (RuntimeError("CUDA error: an illegal access\nSearch for it"), "RuntimeError: CUDA error: an illegal access"),
        (torch.OutOfMemoryError("CUDA out. " + "x" * 999), "OutOfMemoryError: CUDA out. " + "x" * 172),
        (KeyError("a figure"), "KeyError: 'a figure'"),
        (RuntimeError(""), "RuntimeError: "),
    ],
)
def test_one_line_says_what_was_wrong(error: BaseException, said: str) -> None:
    assert reason(error) == said and len(said) <= failures.LINE


def test_an_assertion_without_words_says_where_it_stands() -> None:
    def asserting() -> None:
        assert len("abc") == 4

    with pytest.raises(AssertionError) as caught:
        asserting()
    bare = AssertionError()
    bare.__traceback__ = caught.tb
    assert reason(bare).startswith("AssertionError: line ") and "of asserting: assert len" in reason(bare)


def test_the_detail_is_the_end_of_the_whole_chain() -> None:
    error = raised(RuntimeError("y" * 9000 + "the end"), raised(LookupError("where it came from")))
    assert len(detail(error)) == failures.DETAIL and detail(error).endswith("the end\n")
    short = detail(raised(RuntimeError("last"), raised(LookupError("where it came from"))))
    assert "LookupError: where it came from" in short and short.endswith("RuntimeError: last\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it said nothing"),
        ("one\ntwo\n", "two"),
        ("ValueError: right\n\nSet this for more\n", "ValueError: right"),
        ("torch._inductor.exc.InductorError: LoweringException: x\nbye", "InductorError: LoweringException: x"),
        ("Fatal Python error: Segmentation fault\n\nCurrent thread\n", "Fatal Python error: Segmentation fault"),
    ],
)
def test_what_a_process_ended_with(text: str, said: str) -> None:
    assert said_in(text) == said


@pytest.mark.parametrize(
    "error",
    [KeyError("k"), IndexError("i"), ZeroDivisionError("z"), subprocess.CalledProcessError(1, "cc"), PTXASError("p")],
)
def test_a_cell_may_fail_with_it(error: BaseException) -> None:
    assert isinstance(error, FAILURES)
    assert not issubclass(failures.DeviceLost, FAILURES), "which no cell goes on behind"


@pytest.mark.parametrize(("answer", "lost"), [(None, False), (RuntimeError("CUDA error"), True)])
def test_a_device_is_lost_when_nothing_works_on_it(
    answer: Exception | None, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize(device: Any) -> None:
        if answer is not None:
            raise answer

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert is_lost(torch.device("cuda")) is lost and not is_lost(torch.device("cpu"))
