"""Every example runs, uncompiled for speed, and gives what its text promises."""

from __future__ import annotations

import json
import runpy
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from selective_compile.options import BackendOptions, EngineConfig

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("01_compile", "02_generate", "03_engine", "04_explain", "05_wishes", "06_server")
README = EXAMPLES.parent / "README.md"


def main_of(name: str) -> Callable[..., Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def test_each_example_is_run_by_a_test_and_short() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(NAMES)
    for name in NAMES:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 70, name


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


@pytest.mark.filterwarnings("ignore")
def test_server() -> None:
    serving = runpy.run_path(str(EXAMPLES / "06_server.py"))["serving"]
    with serving(port=0, compile=False) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            asked = json.dumps({"prompt": "letters c to j:", "max_new_tokens": 60}).encode()
            answers = [urllib.request.urlopen(f"{address}/generate", asked).read() for _ in range(2)]
            assert answers == [b" c d e f g h i j."] * 2
            stopped = json.dumps({"prompt": "letters c to j:", "max_new_tokens": 60, "stop_strings": ["f"]}).encode()
            assert urllib.request.urlopen(f"{address}/generate", stopped).read() == b" c d e f"
            wrong = [b'{"prompt": "a", "max_new_tokens": -1}', b'"x"', b"null", b"[1]", b"{", b"[" * 10**5]
            for body in (*wrong, b'{"max_new_tokens": 3}', b'{"prompt": "a", "cache_salt": "b"}', b'{"prompt": 5}'):
                with pytest.raises(urllib.error.HTTPError, match="400"):
                    urllib.request.urlopen(f"{address}/generate", body)
            assert b"selective_requests_total" in urllib.request.urlopen(f"{address}/metrics").read()
        finally:
            server.shutdown()
            thread.join()


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
