"""The command line: what is printed, what is refused, and with which exit status."""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from typer.testing import CliRunner, Result

import selective_compile
from selective_compile import backend, checkpoints, cli, demo, generating, tiny_model
from selective_compile.backend import Program, compile_step_program
from selective_compile.bench import rounds, settings
from selective_compile.bench.figures import store, stored
from selective_compile.checkpoints import Checkpoint
from selective_compile.generating import Prompts
from selective_compile.options import EngineConfig
from selective_compile.report import refused_report
from selective_compile.runtime import StepError, model_runner, replay_engine
from selective_compile.tiny_model.tokenizer import BOS, EOS, PAD, VOCAB_SIZE, build
from tests.test_bench_results import RESULTS

LOAD = checkpoints.load
OF_PROGRAMS = (
    *("compile", "dtype", "fallback", "implementation", "batch_invariant"),
    *("kv_dtype", "latents", "max_attention_window", "threads", "weights"),
)
COMMANDS = ("demo", "generate", "explain", "bench", "coverage", "replay", "logit-error")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with random weights: to the commands, a model that is not the one that ships."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    ends = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    config = LlamaConfig(vocab_size=VOCAB_SIZE, **sizes, **heads, **ends, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(path)
    build().save_pretrained(path)
    return str(path)


@functools.cache
def loaded(name: str | None = None, **options: Any) -> Checkpoint:
    return LOAD(name, **options)


@functools.cache
def proved(model: nn.Module, options: tuple[Any, ...]) -> Program:
    return compile_step_program(model, EngineConfig(**dict(zip(OF_PROGRAMS, options, strict=True))))


@pytest.fixture(autouse=True)
def found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one command has loaded and proved, the next one has: each would do the same, some seconds long."""
    monkeypatch.setattr(checkpoints, "load", loaded)

    def program_of(model: nn.Module, config: EngineConfig) -> Program:
        return proved(model, tuple(getattr(config, name) for name in OF_PROGRAMS))

    for module in (demo, model_runner, replay_engine):
        monkeypatch.setattr(module, "compile_step_program", program_of)


def run(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, arguments, input=input, env={"COLUMNS": "100", "NO_COLOR": "1"})


def ok(*arguments: str, input: str | None = None) -> Result:
    result = run(*arguments, input=input)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: str, input: str | None = None, status: int = 1) -> str:
    """The one line that says what is wrong."""
    result = run(*arguments, input=input)
    assert result.exit_code == status
    assert isinstance(result.exception, SystemExit), "a traceback"
    return result.stderr


# All commands


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples(command: str) -> None:
    out = ok(command, "--help").output
    assert out.count(f"selective-compile {command}") >= 2
    assert max(map(len, out.splitlines())) <= 100


def test_the_commands_are_listed() -> None:
    out = ok("--help").output
    assert all(f" {command} " in out for command in COMMANDS)


def test_a_checkout_that_is_not_installed_has_it_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["selective-compile", "--help"])
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("selective_compile", run_name="__main__")
    signal.signal(signal.SIGINT, handler)
    assert not ended.value.code
    assert " replay " in capsys.readouterr().out


LIGHT = """
import sys
from selective_compile.cli import main
try:
    main()
finally:
    print(sorted({"torch", "transformers", "matplotlib"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--help"], "logit-error"),
        (["bench", "--help"], "--peers"),
        (["coverage", "--help"], "--mutations"),
        (["generate", "--max-new-tokens", "many"], "--max-new-tokens"),
    ],
    ids=" ".join,
)
def test_who_asks_for_help_or_mistypes_waits_for_no_library(arguments: list[str], told: str) -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT, *arguments], capture_output=True, text=True)
    assert told in done.stdout + done.stderr
    assert done.stderr.endswith("[]\n")


@pytest.mark.parametrize("seconds", [0.1, 0.4, 0.6, 1.5])
def test_an_interrupt_before_there_is_work_is_a_word_too(seconds: float) -> None:
    """Torch drops what Python raises while it loads, and nothing else would be told of it."""
    code = "from selective_compile.__main__ import main; main()"
    command = [sys.executable, "-c", f"import sys; sys.argv[1:] = ['explain']; {code}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    if process.returncode == -signal.SIGINT and seconds == 0.1:
        pytest.skip("Python itself had not begun yet")
    assert (process.returncode, out) == (130, "") and errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors


def test_what_cannot_be_printed_is_told_in_a_line() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    code = "from selective_compile.__main__ import main; main()"
    command = [sys.executable, "-c", f"import sys; sys.argv[1:] = ['--help']; {code}"]
    with full.open("w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr.splitlines() == ["error: [Errno 28] No space left on device"]


def test_a_terminal_without_the_characters_gets_others() -> None:
    code = "from selective_compile import cli, __main__; cli.main = lambda: print('\\u2500 \\u2026'); __main__.main()"
    asked = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=asked, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("? ?\n", "")


def test_the_version_is_told() -> None:
    assert ok("--version").stdout == f"{selective_compile.__version__}\n"


def test_words_are_completed() -> None:
    asked = {"_SELECTIVE_COMPILE_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    asked |= {"COMP_WORDS": "selective-compile bench --pe"}
    code = "import sys; sys.argv[0] = 'selective-compile'; from selective_compile.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True)
    assert done.stdout.split() == ["--peers"], done.stderr


def test_an_unknown_option_is_an_error() -> None:
    assert "No such option" in refused("explain", "--fast", status=2)


@pytest.mark.parametrize("command", ["demo", "generate", "explain"])
def test_a_folder_without_a_model_is_told_in_a_line(command: str, tmp_path: Path) -> None:
    words = ["12+7="] if command == "generate" else []
    error = refused(command, "--model", str(tmp_path), *words)
    assert error == f"error: model must be a folder with a config.json, got {str(tmp_path)!r}\n"


def test_a_name_that_is_no_model_is_told_in_a_line() -> None:
    error = refused("explain", "--model", "./no/such/folder")
    assert error == "error: model must be a folder with a config.json, got './no/such/folder'\n"
    error = refused("explain", "--model", "no//such name")
    assert error.startswith("error: model must be a folder or a Hugging Face id") and error.count("\n") == 1


def test_a_device_that_is_not_there_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "device must be cpu where torch finds no GPU, got 'cuda'" in refused("explain", "--device", "cuda")
    assert "device must be one that torch knows" in refused("explain", "--device", "abacus")


def test_interrupting_ends_with_130_and_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> Checkpoint:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "load", interrupted)
    assert refused("demo", status=130) == "interrupted\n"


def test_a_failed_step_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    def failing(*arguments: object) -> list[Any]:
        raise StepError("step 3 failed: out of everything")

    monkeypatch.setattr(generating, "generate_all", failing)
    assert refused("generate", "--model", folder, "abc") == "error: step 3 failed: out of everything\n"


# demo


def test_demo_compares_times_and_draws(folder: str, tmp_path: Path) -> None:
    picture = tmp_path / "schedule.png"
    arguments = ["--model", folder, "--no-compile", "--requests", "5", "--threads", str(torch.get_num_threads())]
    out = ok("demo", *arguments, "--picture", str(picture)).stdout
    parts = ["ragged", "compiled graphs", "same tokens", "generate, one by one", "engine, arriving over time"]
    places = [out.index(part) for part in parts]
    assert places == sorted(places)
    assert "5 of 5 requests got the same tokens as from generate" in out
    assert "x as fast" in out and str(picture) in out.replace("\n", "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert max(map(len, out.splitlines()[:-1])) <= 100


def test_demo_as_json_is_nothing_but_json(folder: str, tmp_path: Path) -> None:
    picture = tmp_path / "schedule.svg"
    arguments = ["--model", folder, "--no-compile", "--requests", "6", "--kv-tokens", "560", "--json"]
    found = json.loads(ok("demo", *arguments, "--seed", "3", "--picture", str(picture)).stdout)
    assert found["verdicts"] == {"equal": 6, "near tie": 0, "different": 0}
    assert found["report"]["verdict"] == "ragged" and found["graphs"] == 0
    assert len(found["requests"]) == 6 and found["picture"] == str(picture)
    generated = sum(len(request["tokens"]) for request in found["requests"])
    assert found["engine"]["tokens_generated"] == generated
    assert found["one_by_one"]["tokens_per_second"] == pytest.approx(generated / found["one_by_one"]["seconds"])
    assert picture.exists()


def test_demo_fails_where_a_token_differs(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = demo.through_engine

    def off_by_one(*arguments: Any) -> demo.EngineRun:
        served = real(*arguments)
        served.way.tokens[1][2] ^= 1
        return served

    monkeypatch.setattr(demo, "through_engine", off_by_one)
    picture = str(tmp_path / "schedule.png")
    result = run("demo", "--model", folder, "--no-compile", "--requests", "3", "--picture", picture)
    assert result.exit_code == 1
    assert "2 of 3 requests got the same tokens" in result.stdout and "NO, by" in result.stdout
    assert result.stderr == "error: the engine's tokens differ from those of generate\n"


def test_demo_refuses_a_picture_it_could_not_write_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    assert "must end in .png or .svg" in refused("demo", "--picture", "schedule.gif")


def test_demo_prompts_arrive_over_time_and_have_answers_for_the_shipped_model_only(folder: str) -> None:
    foreign = checkpoints.load(folder)
    wanted = demo.make_requests(foreign, 12, seed=0)
    arrivals = [request.arrival for request in wanted]
    assert arrivals[0] == 0 and arrivals == sorted(arrivals) and arrivals[-1] > 5
    assert all(request.answer is None for request in wanted)
    own = Checkpoint(name="", shipped=True, model=foreign.model, tokenizer=foreign.tokenizer)
    assert any(request.answer for request in demo.make_requests(own, 12, seed=0))


class Scripted(nn.Module):
    """Gives the same logits at every position."""

    dtype = torch.float32

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.tensor(logits))

    def forward(self, ids: Tensor, use_cache: bool) -> Any:
        return type("Output", (), {"logits": self.row.expand(*ids.shape, -1)})


def scripted(*logits: float, shipped: bool = False) -> Checkpoint:
    model: Any = Scripted(*logits)
    return Checkpoint(name="scripted", shipped=shipped, model=model, tokenizer=build())


def test_a_near_tie_is_told_apart_from_a_difference() -> None:
    tied = (1.0, 1.0 - 5e-5, -1.0)
    assert demo.compare(scripted(*tied), [0], [0, 0], [0, 0]).verdict == "equal"
    near = demo.compare(scripted(*tied), [0], [0, 1], [0, 0])
    assert near.verdict == "near tie" and near.behind == pytest.approx(5e-5, rel=0.01)
    # One wrong token behind a near tie is still wrong, and the model that ships has no near ties.
    assert demo.compare(scripted(*tied), [0], [1, 2], [0, 0]).verdict == "different"
    assert demo.compare(scripted(*tied, shipped=True), [0], [0, 1], [0, 0]).verdict == "different"
    apart = demo.compare(scripted(1.0, 0.5), [0], [0, 1], [0, 0])
    assert apart.verdict == "different" and apart.behind == pytest.approx(0.5)


def test_ending_early_is_a_difference() -> None:
    stopped = demo.compare(scripted(1.0, 1.0), [0], [0], [0, 0])
    assert stopped.verdict == "different" and stopped.behind is None


def test_a_padded_row_ends_with_its_end_of_sequence() -> None:
    assert demo.until_end([5, 9, 7, 7], 9) == [5, 9]
    assert demo.until_end([5, 9, 7], [7, 9]) == [5, 9]
    assert demo.until_end([5, 6], None) == [5, 6]
    ids, mask = demo.left_padded([[1, 2, 3], [4]], 0, "cpu")
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]


# generate


def expected_text(folder: str, prompt: str, new_tokens: int) -> str:
    checkpoint = checkpoints.load(folder)
    ids = torch.tensor([checkpoint.tokenizer(prompt).input_ids])
    model: PreTrainedModel = checkpoint.model
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=checkpoint.greedy(new_tokens))
    return checkpoint.decoded(out[0, ids.shape[1] :].tolist())


def test_generate_continues_arguments_and_lines(folder: str) -> None:
    texts = ["count 3 to 9:", "the key"]
    wanted = "".join(f"{text}{expected_text(folder, text, 6)}\n" for text in texts)
    options = ["--model", folder, "--max-new-tokens", "6"]
    assert ok("generate", *options, *texts).stdout == wanted
    assert ok("generate", *options, input=f"{texts[0]}\n\n{texts[1]}\n").stdout == wanted


def test_generate_streams_the_same_text(folder: str) -> None:
    options = ["--model", folder, "--max-new-tokens", "12"]
    assert ok("generate", *options, "--stream", "the key").stdout == expected_text(folder, "the key", 12) + "\n"


def test_generate_as_json_and_sampling_by_seed(folder: str) -> None:
    def sampled(seed: int) -> list[dict[str, Any]]:
        options = ["--temperature", "1.5", "--top-k", "50", "--max-new-tokens", "8", "--json"]
        result = ok("generate", "--model", folder, *options, "--seed", str(seed), "abc", "abc")
        return [{**answer, "seconds": 0} for answer in json.loads(result.stdout)]

    first = sampled(1)
    assert first == sampled(1) != sampled(2)
    assert first[0]["tokens"] != first[1]["tokens"], "the same prompt twice must not sample the same"
    assert first[0]["prompt_tokens"] == 4 and first[0]["finish_reason"] in ("length", "stop")


def test_sampling_is_on_where_it_is_asked_for() -> None:
    def options(**given: Any) -> dict[str, Any]:
        filled = {"temperature": None, "top_k": None, "top_p": None, **given}
        return Prompts.of(["a"], max_new_tokens=3, **filled).options

    assert options() == options(temperature=0.0) == {"max_new_tokens": 3, "do_sample": False}
    assert options(temperature=0.5)["temperature"] == 0.5
    assert options(temperature=0.5) | {"temperature": 1.0, "top_p": 0.9} == options(top_p=0.9)
    with pytest.raises(ValueError, match="temperature must be above 0 with top-k or top-p, got 0"):
        options(temperature=0.0, top_k=3)


def test_prompts_that_are_no_text_are_told_in_a_line(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "prompts must be text, got bytes" in refused("generate", "--model", folder, "a\udcffb")
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.lines_of_stdin() == []


def test_generate_refuses_in_a_line(folder: str) -> None:
    assert "prompts must be given" in refused("generate", input="")
    assert "--stream must come with one prompt" in refused("generate", "--stream", "a", "b")
    error = refused("generate", "--model", folder, "--max-new-tokens", "2000", "abc")
    assert error.startswith("error: max_new_tokens must be at most 1021") and error.count("\n") == 1


# explain


def test_explain_prints_and_exports(folder: str) -> None:
    assert "1 attention calls run per request" in ok("explain", "--model", folder).stdout
    found = json.loads(ok("explain", "--model", folder, "--json").stdout)
    assert found["verdict"] == "ragged" and len(found["calls"]) == 1


def test_explain_fails_where_the_model_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "explain", lambda model: refused_report("Odd", "its mask is odd"))
    result = run("explain", "--model", folder)
    assert result.exit_code == 1
    assert "Odd: refused" in result.stdout and result.stderr == "error: the model is refused\n"


# bench


@pytest.mark.slow
def test_bench_keeps_results_beside_one_another_and_shows_them(tmp_path: Path) -> None:
    path, pictures = tmp_path / "figures.json", tmp_path / "pictures"
    store(path, {"1b alone float32 saturated": {"peers": {}}})
    options = ["--quick", "--no-compile", "--dtypes", "float32", "--peers", "generate", "--model", "135m"]
    threads = ["--threads", str(torch.get_num_threads())]
    traces = ["--trace", "alone,shared_prefix"]
    out = ok("bench", *options, *threads, *traces, "--out", str(path), "--plot", str(pictures)).stdout
    names = [f"quick 135m {trace} float32 saturated" for trace in ("alone", "shared_prefix")]
    assert all(name in out for name in names) and "GB/s" in out and "not told" not in out
    tables = [line for line in out.splitlines() if not line.startswith(("picture: ", "figures: "))]
    assert max(map(len, tables)) <= 100
    found = stored(path)
    assert list(found) == ["1b alone float32 saturated", *names]
    assert found[names[1]]["trace"] == "shared_prefix" and list(found[names[1]]["peers"]) == ["generate"]
    assert (pictures / "quick_135m_alone_float32_saturated.png").exists()
    store(path, {name: found[name] for name in names})
    assert ok("bench", "--show", "--out", str(path)).stdout.splitlines()[:-1] == [
        line for line in out.splitlines() if not line.startswith(("picture: ", "figures: "))
    ]


def test_bench_refuses_in_a_line(tmp_path: Path) -> None:
    assert "peers must be one or more of engine" in refused("bench", "--quick", "--peers", "sglang")
    assert "model must be one of 125m" in refused("bench", "--quick", "--model", "135m,7b")
    assert "trace must be one of skewed" in refused("bench", "--quick", "--trace", "short")
    missing = str(tmp_path / "missing" / "figures.json")
    assert "--out must lie in a folder that exists" in refused("bench", "--out", missing)
    assert "--show must come with an --out that exists" in refused("bench", "--show")
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert "--out must be a new file or one of this command" in refused("bench", "--out", str(other))


def test_bench_names_what_failed_and_shows_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = {**RESULTS["0.5b alone bfloat16 saturated"], "failed": {"vllm": "no room"}}
    monkeypatch.setattr(rounds, "run_benchmark", lambda *_: iter([("a", result), ("b", result)]))
    path = tmp_path / "figures.json"
    ended = run("bench", "--out", str(path))
    assert ended.exit_code == 1 and ended.stderr.endswith("error: failed: vllm in a, vllm in b\n")
    assert "vllm FAILED: no room" in ended.stdout and list(stored(path)) == ["a", "b"]
    assert run("bench", "--show", "--out", str(path)).exit_code == 0


def test_bench_offers_what_the_benchmark_has() -> None:
    out = "".join(ok("bench", "--help").output.replace("│", "").split())
    for names in (settings.PEERS, settings.DTYPES, settings.MODES, settings.MODELS, settings.TRACES):
        assert ",".join(names) in out


# The model that ships


def test_demo_with_the_model_that_ships(tmp_path: Path) -> None:
    picture = str(tmp_path / "schedule.png")
    found = json.loads(ok("demo", "--no-compile", "--picture", picture, "--json").stdout)
    assert found["verdicts"] == {"equal": 24, "near tie": 0, "different": 0}
    assert found["model"] == str(tiny_model.path())


def test_generate_with_the_model_that_ships() -> None:
    assert ok("generate", "12+7=").stdout == "12+7=19\n"


# logit-error


def test_the_error_of_int8_keys_and_values_is_measured() -> None:
    found = json.loads(ok("logit-error", "12+7=19", "--json").stdout)
    assert 0 < found["mean_error"] < 0.05 and found["tokens"] == 8
    assert (found["exact_kv_bytes"], found["kv_bytes"]) == (2560, 720)
    assert "config must change results by one of" in refused("logit-error", "12+7=19", "--kv-dtype", "auto")


# replay


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of two sampled requests to the model that ships."""
    path = str(tmp_path_factory.mktemp("recorded") / "run.jsonl")
    ok("generate", "12+7=", "letters c to j:", "--record", path, "--temperature", "0.9", "--seed", "3")
    return path


def test_what_was_recorded_is_served_again_drawn_and_traced(log: str, tmp_path: Path) -> None:
    """With the model and without: the same batches, and the same picture of them."""
    picture, trace = (str(tmp_path / name) for name in ("run.svg", "run.json"))
    events = []
    for how in ((), ("--schedule-only",)):
        said = ok("replay", log, *how, "--picture", picture, "--trace", trace).stdout
        assert said.startswith("2 requests, ") and "the same batches" in said
        assert ("the same batches and tokens" in said) == (how == ())
        assert f"picture of the schedule: {picture}" in said and f"trace: {trace}" in said
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")
        events.append(json.loads(Path(trace).read_text()))
    served, decided = events
    assert decided == served and len(decided) > 20
    assert {event["args"]["name"] for event in decided if event["name"] == "thread_name"} == {"steps", "0", "1"}


def test_a_replay_as_json_and_of_what_is_no_log(log: str) -> None:
    alone = json.loads(ok("replay", log, "--schedule-only", "--json").stdout)
    assert alone["difference"] is None and alone["requests"] == 2 and alone["tokens"] > 10
    assert "must be an event log" in refused("replay", __file__)


def test_what_a_replay_writes_is_not_its_log(log: str, tmp_path: Path) -> None:
    before = Path(log).read_text()
    for name in ("record", "trace"):
        assert f"--{name} must be another file than the log" in refused("replay", log, f"--{name}", log)
    assert "--record must not come with --schedule-only" in refused(
        "replay", log, "--schedule-only", "--record", str(tmp_path / "again.jsonl")
    )
    assert "picture must end in .png or .svg" in refused("replay", log, "--picture", "x.gif")
    assert Path(log).read_text() == before
