"""Coroutines read requests: beside a background thread or without one, cancelled, late, in a loop that is closed."""

from __future__ import annotations

import asyncio
import copy
import pickle
from contextlib import nullcontext

import pytest

from selective_compile.runtime import Engine, Request
from tests.runtime.simulated import SimulatedProgram, expected_tokens, simulated_engine

SECONDS = 20.0  # far more than anything here takes


def expected(request: Request) -> list[int]:
    return expected_tokens(request.prompt_ids, request.params)


async def read(request: Request) -> list[int]:
    return [token async for token in request]


@pytest.mark.parametrize("driven", [True, False], ids=["driven", "driving"])
def test_many_coroutines_read_at_once_and_their_loop_goes_on(driven: bool) -> None:
    engine = simulated_engine(max_requests=4)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        counting = asyncio.create_task(count())
        requests = [engine.submit([1, number], max_new_tokens=9) for number in range(12)]
        found = await asyncio.wait_for(asyncio.gather(*map(read, requests)), SECONDS)
        counting.cancel()
        assert found == [*map(expected, requests)]

    with engine.running() if driven else nullcontext():
        asyncio.run(main())
    assert turns > 1


@pytest.mark.parametrize("driven", [True, False], ids=["driven", "driving"])
def test_a_result_is_awaited(driven: bool) -> None:
    engine = simulated_engine()

    async def main() -> None:
        request = engine.submit([1, 2], max_new_tokens=4)
        result = await asyncio.wait_for(request, SECONDS)
        assert result == request.result() == await request
        assert list(result.tokens) == expected(request)

    with engine.running() if driven else nullcontext():
        asyncio.run(main())


def test_a_coroutine_that_is_cancelled_leaves_the_request_to_others() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program)

    async def main() -> Request:
        request = engine.submit([3, 4], max_new_tokens=40)
        reader = asyncio.create_task(read(request))
        await anext(aiter(request))
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await asyncio.wait_for(read(request), SECONDS) == expected(request)
        return request

    with engine.running():
        assert asyncio.run(main()).finish_reason == "length"


def test_what_ends_with_an_error_raises_behind_its_tokens() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program)

    async def main() -> None:
        request, tokens = engine.submit([1, 2], max_new_tokens=40), []
        with pytest.raises(RuntimeError, match="failed: .*broken"):
            async for token in request:
                tokens.append(token)
                program.before_run = broken
        assert tokens and tokens == expected(request)[: len(tokens)]
        assert (await request).finish_reason == "error"

    asyncio.run(main())


def broken() -> None:
    raise RuntimeError("broken")


def test_a_cancelled_request_ends_its_coroutines() -> None:
    engine = simulated_engine()

    async def main(request: Request) -> list[int]:
        asyncio.get_running_loop().call_later(0.05, request.cancel)
        return await asyncio.wait_for(read(request), SECONDS)

    with engine.running():
        request = engine.submit([1, 2], max_new_tokens=4000)
        found = asyncio.run(main(request))
    assert request.finish_reason == "cancelled" and found == request.tokens


def test_the_thread_that_ends_hands_the_steps_over_to_coroutines() -> None:
    engine = simulated_engine()

    async def main() -> None:
        with engine.running():
            request = engine.submit([1, 2], max_new_tokens=300)
            reader = asyncio.create_task(read(request))
            await anext(aiter(request))
        assert await asyncio.wait_for(reader, SECONDS) == expected(request)

    asyncio.run(main())


def test_a_loop_that_was_closed_keeps_no_step() -> None:
    engine = simulated_engine()
    request = engine.submit([1, 2], max_new_tokens=3)
    loop = asyncio.new_event_loop()

    async def wait_for_a_change() -> None:
        with request._lock:
            request._awaiting.change()

    loop.run_until_complete(wait_for_a_change())
    loop.close()
    assert list(request) == expected(request)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_handle_is_not_copied(copied: object) -> None:
    request = simulated_engine().submit([1], max_new_tokens=1)
    with pytest.raises(TypeError, match="a Request must not be copied or pickled"):
        copied(request)  # type: ignore[operator]


def test_an_engine_says_what_it_is() -> None:
    engine: Engine = simulated_engine()
    engine.submit([1], max_new_tokens=1)
    assert repr(engine) == "Engine(SimulatedModel, 0 running, 1 waiting)"
