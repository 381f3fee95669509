"""Every example runs, uncompiled for speed, and gives what its text promises."""

from __future__ import annotations

import json
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from pathlib import Path
from socket import create_connection
from typing import Any

import pytest
import transformers
from torch import Tensor

from selective_compile.options import BackendOptions, EngineConfig
from selective_compile.runtime import Engine, Request

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("01_compile", "02_generate", "03_engine", "04_explain", "05_wishes", "06_server")
README = EXAMPLES.parent / "README.md"


def main_of(name: str) -> Callable[..., Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def test_each_example_is_run_by_a_test_and_short() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(NAMES)
    for name in NAMES:
        longest = 100 if name == "06_server" else 70
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < longest, name


def test_compile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_of("01_compile")(inductor=False) < 1e-4
    assert "192 positions in the padded batch, 84 of them tokens" in capsys.readouterr().out


def test_generate(capsys: pytest.CaptureFixture[str]) -> None:
    texts = main_of("02_generate")(compile=False)
    assert texts[:3] == ["12+7=19", "letters c to j: c d e f g h i j.", "after monday comes tuesday."]
    assert "equal to model.generate: True" in capsys.readouterr().out


def test_engine(capsys: pytest.CaptureFixture[str]) -> None:
    answers = main_of("03_engine")(compile=False)
    assert answers["late"] == "19"
    assert answers["shopping"] == " 17 figs."
    assert answers["letters"] == " a b c d e f g h i j k l m."
    out = capsys.readouterr().out
    assert "shopping:  17 figs.\n" in out
    assert "step 0: 16 of letters\nstep 1: 1 of letters, 15 of shopping\n" in out


def test_wishes(capsys: pytest.CaptureFixture[str]) -> None:
    answers = main_of("05_wishes")(compile=False)
    assert (answers["plain"], answers["likeliest"], answers["stop string"]) == ("19", "7", " c d e f g")
    assert not set("0123456789") & set(answers["own processor"])
    triples = [answers["no repeats"][start : start + 3] for start in range(len(answers["no repeats"]) - 2)]
    assert triples and len(set(triples)) == len(triples)
    assert set(json.loads(answers["schema"])) == {"sum", "odd"}
    assert "likeliest: '7' (stop)\n'7': -0.0" in capsys.readouterr().out


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    report, refused = main_of("04_explain")()
    assert report.ok and len(report.calls) == 5
    assert not refused.ok and len(refused.refusals) == 1
    assert "logits.mean(dim=1, keepdim=True)" in capsys.readouterr().out


@contextmanager
def served() -> Iterator[int]:
    """The port of the server, which runs in threads of this process."""
    with runpy.run_path(str(EXAMPLES / "06_server.py"))["serving"](port=0, compile=False) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


LETTERS = {"prompt": "letters c to j:", "max_new_tokens": 60}


def sent(port: int, body: Any = LETTERS, path: str = "/generate") -> HTTPConnection:
    """A connection with a request whose answer has not been looked at."""
    connection = HTTPConnection("127.0.0.1", port)
    connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body))
    return connection


def answer(connection: HTTPConnection) -> tuple[int, str]:
    with closing(connection), connection.getresponse() as response:
        return response.status, response.read().decode()


def begun(connection: HTTPConnection) -> HTTPResponse:
    """The answer, once some of its text is there."""
    response = connection.getresponse()
    assert (response.status, response.read(1)) == (200, b" ")
    return response


def with_each_token(patch: pytest.MonkeyPatch, call: Callable[[Request, int], None]) -> None:
    """Have the steps of all requests call this, with how many tokens there are; what it raises ends the request."""
    submit = Engine.submit

    def submit_with_processor(engine: Engine, prompt: list[int], **options: Any) -> Request:
        submitted = threading.Event()

        def process(tokens: Tensor, scores: Tensor) -> Tensor:
            submitted.wait()
            call(request, tokens.shape[1] - len(prompt))
            return scores

        request = submit(engine, prompt, logits_processor=[process], **options)
        submitted.set()
        return request

    patch.setattr(Engine, "submit", submit_with_processor)


def hold(request: Request, count: int) -> None:
    """No step ends behind the fourth token until the request is cancelled."""
    while count == 4 and not request.finished:
        time.sleep(0.01)


def test_server() -> None:
    with served() as port:
        assert [answer(sent(port)) for _ in range(2)] == [(200, " c d e f g h i j.")] * 2
        assert answer(sent(port, LETTERS | {"stop_strings": ["f"]})) == (200, " c d e f")
        assert answer(sent(port, {"prompt": ""}))[0] == 200
        metrics = HTTPConnection("127.0.0.1", port)
        metrics.request("GET", "/metrics")
        status, text = answer(metrics)
        assert status == 200 and "selective_requests_total" in text


def test_server_refuses_what_is_no_request() -> None:
    texts = [
        b'"x"',
        b"null",
        b"[1]",
        b"{",
        b"[" * 10**5,
        b"\xff",
        b"",
        b'{"prompt": "a", "do_sample": true, "temperature": 1%s}' % (b"0" * 400),
    ]
    without = [{"max_new_tokens": 3}, {"prompt": "a", "cache_salt": "b"}, {"prompt": "a", "max_new_tokens": -1}]
    prompts = [5, [], [1], ["a"], {}, None, "\ud800"]
    with served() as port:
        for body in (*texts, *without, *({"prompt": prompt} for prompt in prompts)):
            assert answer(sent(port, body))[0] == 400, body
        for body in (LETTERS, b"a" * 2**23):
            assert answer(sent(port, body, path="/metrics"))[0] == 404
        assert answer(sent(port, b" " * 2**20 + b"{}"))[0] == 413
        for length, status in (("99999999999999", 413), ("-1", 413), ("x", 400), ("9" * 5000, 400)):
            connection = HTTPConnection("127.0.0.1", port)
            connection.request("POST", "/generate", b"{}", {"Content-Length": length})
            assert answer(connection)[0] == status
        for path in ("/", "/generate", "/metrics/"):
            connection = HTTPConnection("127.0.0.1", port)
            connection.request("GET", path)
            assert answer(connection)[0] == 404
        with create_connection(("127.0.0.1", port)) as old, old.makefile("rb") as lines:
            old.sendall(b'POST /generate HTTP/1.0\r\nContent-Length: 15\r\n\r\n{"prompt": "a"}')
            assert b" 404 " in lines.readline()  # it knows no chunks


def test_server_takes_what_follows_a_request_for_nothing() -> None:
    with served() as port, create_connection(("127.0.0.1", port)) as client, client.makefile("rb") as lines:
        asked = b"GET /metrics HTTP/1.1\r\n"
        client.sendall(asked + b"Content-Length: %d\r\n\r\n" % len(asked + b"\r\n") + asked + b"\r\n")
        assert lines.read().count(b"HTTP/1.1 200") == 1


def test_server_takes_a_burst_of_clients() -> None:
    with runpy.run_path(str(EXAMPLES / "06_server.py"))["serving"](port=0, compile=False) as server:
        clients = [create_connection(server.server_address, timeout=60) for _ in range(40)]  # nobody accepts yet
        for client in clients:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            for client in clients:
                with client, client.makefile("rb") as lines:
                    assert lines.readline() == b"HTTP/1.1 200 OK\r\n"
        finally:
            server.shutdown()
            thread.join()


def test_server_tells_of_an_error_before_and_behind_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: Request, count: int) -> None:
        if count == 4:
            raise ValueError("the fifth token")

    with served() as port:
        status, text = answer(sent(port, {"prompt": "3+4=", "temperature": 1e-300, "do_sample": True}))
        assert status == 500 and "no token can be drawn" in text
        with_each_token(monkeypatch, fail)
        with closing(sent(port)) as connection, begun(connection) as response, pytest.raises(IncompleteRead):
            response.read()


def test_server_lets_its_readers_go_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with_each_token(monkeypatch, hold)
    with served() as port:
        connection = sent(port)
        response = begun(connection)
    with closing(connection), response, pytest.raises(IncompleteRead):
        response.read()


@pytest.mark.parametrize("late", [False, True])
def test_server_answers_at_the_end_who_has_no_text_yet(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, left = threading.Event(), threading.Event()

    def hold_first(request: Request, count: int) -> None:
        assert not late
        arrived.set()
        while not request.finished:
            time.sleep(0.01)

    with_each_token(monkeypatch, hold_first)
    submit = Engine.submit

    def submit_late(*arguments: Any, **options: Any) -> Request:
        arrived.set()
        left.wait()
        return submit(*arguments, **options)

    if late:
        monkeypatch.setattr(Engine, "submit", submit_late)
    with served() as port:
        connection = sent(port)
        arrived.wait()
    left.set()
    assert answer(connection)[0] == 503


def test_server_cancels_whose_reader_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = threading.Event()
    requests: list[Request] = []

    def hold_twice(request: Request, count: int) -> None:
        requests.append(request)
        if count == 2:
            gone.wait()
        while count == 12 and not request.finished:  # text enough to see that nobody reads
            time.sleep(0.01)

    with_each_token(monkeypatch, hold_twice)
    with served() as port:
        with closing(sent(port)) as connection:
            begun(connection).close()
        gone.set()
        assert requests[0].result(timeout=60).finish_reason == "cancelled"


HELD = """
import signal, pytest
from tests.test_examples import hold, main_of, with_each_token
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
with_each_token(pytest.MonkeyPatch(), hold)
main_of("06_server")(port=0, compile=False)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_server_ends_in_order_when_it_is_told_to(number: signal.Signals, tmp_path: Path) -> None:
    with (
        (tmp_path / "errors").open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", HELD], cwd=EXAMPLES.parent, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child,
    ):
        try:
            assert child.stdout is not None
            found = re.search(r"localhost:(\d+)/", child.stdout.readline())
            assert found, (tmp_path / "errors").read_text()
            with closing(sent(int(found[1]))) as connection, begun(connection) as response:
                child.send_signal(number)
                with pytest.raises(IncompleteRead):
                    response.read()
            assert child.wait() == 0
        finally:
            child.kill()
    assert "Traceback" not in (tmp_path / "errors").read_text()


def blocks_of_readme() -> list[str]:
    """What stands between its fences."""
    return README.read_text().split("```")[1::2]


def test_the_readmes_first_lines_run_and_print_what_it_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, name in ((EngineConfig, "compile"), (BackendOptions, "inductor")):
        defaults = options.__init__.__kwdefaults__ | {name: False}
        monkeypatch.setattr(options.__init__, "__kwdefaults__", defaults)
    code, printed = blocks_of_readme()[:2]
    assert code.startswith("python\n")
    exec(compile(code.removeprefix("python\n"), str(README), "exec"), {"__name__": "readme"})
    out = capsys.readouterr().out
    assert "['12+7=19', 'letters c to j: c d e f g h i j.']\n tuesday." in out
    if transformers.__version__.startswith("5.24."):  # the report has its source lines
        assert printed.strip() in out
