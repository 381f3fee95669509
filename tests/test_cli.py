"""The command line: what is printed, what is refused, and with which exit status."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import selective_compile
from selective_compile import backend, checkpoints, cli, cores, generating, tiny_model
from selective_compile.bench import rounds, settings
from selective_compile.bench.figures import store, stored
from selective_compile.checkpoints import Checkpoint
from selective_compile.generating import Prompts
from selective_compile.report import refused_report
from selective_compile.runtime import StepError
from tests.commands import folder as folder
from tests.commands import found_again as found_again
from tests.commands import ok, refused, run
from tests.test_bench_results import RESULTS

COMMANDS = ("demo", "generate", "explain", "bench", "coverage", "replay", "logit-error")


# All commands


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples(command: str) -> None:
    out = ok(command, "--help").output
    assert out.count(f"selective-compile {command}") >= 2
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_names_whole_and_lines_as_wide_as_the_terminal(command: str) -> None:
    out = ok(command, "--help").output
    group = typer.main.get_command(cli.app)
    assert isinstance(group, cli.Commands)
    told = group.commands[command]
    words = out.replace(",", " ").split()
    assert {name for each in told.params for name in (*each.opts, *each.secondary_opts) if "--" in name} <= {*words}
    prose = out.split("\n\n")[1 : 1 + (told.help or "").split("\b")[0].strip().count("\n\n") + 1]
    for paragraph in prose:
        lines = paragraph.splitlines()
        for line, following in zip(lines, lines[1:], strict=False):
            assert len(line) + 1 + len(following.split()[0]) > 78, line


def test_the_commands_are_listed_with_what_they_do() -> None:
    out = ok("--help").output
    assert all(f" {command} " in out for command in COMMANDS)
    assert "compare every batch and token." in " ".join(out.split()) and "..." not in out.split("Commands:")[1]


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
    error = refused("explain", "--model", __file__)
    assert error == f"error: model must be a folder with a config.json, got {__file__!r}\n"
    error = refused("explain", "--model", "no//such name")
    assert error.startswith("error: model must be a folder or a Hugging Face id") and error.count("\n") == 1


def copy_of_shipped(to: Path) -> Path:
    return Path(shutil.copytree(tiny_model.path(), to))


def test_a_checkpoint_without_all_of_its_weights_is_refused(tmp_path: Path) -> None:
    found = copy_of_shipped(tmp_path / "half")
    weights = load_file(found / "model.safetensors")
    save_file({name: each for name, each in weights.items() if ".layers.1." not in name}, found / "model.safetensors")
    error = refused("generate", "--model", str(found), "12+7=")
    assert "model must come with all of its weights" in error and "as model.layers.1." in error


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": "llama", "auto_map": null'])
def test_a_configuration_that_is_broken_is_told_in_a_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    error = refused("explain", "--model", str(tmp_path))
    assert error.startswith("error: config.json must be") and str(tmp_path) in error and error.count("\n") == 1


def test_weights_that_are_cut_short_are_told_in_a_line(tmp_path: Path) -> None:
    found = copy_of_shipped(tmp_path / "cut")
    whole = (found / "model.safetensors").read_bytes()
    (found / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    error = refused("explain", "--model", str(found))
    assert error.startswith("error: model must be a folder or a Hugging Face id") and error.count("\n") == 1


def test_what_a_checkpoint_asks_for_itself(tmp_path: Path) -> None:
    found = copy_of_shipped(tmp_path / "asks")
    asked = json.loads((found / "generation_config.json").read_text()) | {"stop_strings": [" e"]}
    (found / "generation_config.json").write_text(json.dumps(asked))
    assert ok("generate", "--no-compile", "--model", str(found), "letters c to j:").stdout == "letters c to j: c d e\n"
    asked |= {"num_beams": 3, "num_return_sequences": 2}
    (found / "generation_config.json").write_text(json.dumps(asked))
    assert checkpoints.load(str(found)).greedy(4).num_beams == 1
    ok("demo", "--model", str(found), "--requests", "2", "--no-compile")


def test_prompts_may_have_lines_as_of_another_system(folder: str) -> None:
    options = ["generate", "--model", folder, "--max-new-tokens", "6"]
    assert ok(*options, input="the key\r\n").stdout == ok(*options, input="the key\n").stdout


def test_no_more_threads_than_a_system_gives() -> None:
    assert "1024" in refused("generate", "--threads", "100000", "12+7=", status=2)


def test_more_threads_than_cores_are_taken_with_a_warning(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda: 2)
    before = torch.get_num_threads()
    try:
        ok("generate", "--model", folder, "--max-new-tokens", "2", "--threads", "3", "abc")
    finally:
        torch.set_num_threads(before)
    assert "threads=3 on 2 cores" in caplog.text and "EngineConfig" not in caplog.text


@pytest.mark.parametrize("command", [["demo"], ["generate", "12+7="]], ids=" ".join)
def test_a_log_that_cannot_be_written_is_told_before_there_is_work(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(checkpoints, "load")
    missing = tmp_path / "missing" / "run.jsonl"
    error = refused(*command, "--record", str(missing))
    assert error == f"error: --record must lie in a folder that exists, got {str(missing)!r}\n"
    error = refused(*command, "--record", str(tmp_path))
    assert error == f"error: --record must be a file, got the folder {str(tmp_path)!r}\n"


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


def test_the_temperature_that_holds_without_one_is_told() -> None:
    told = " ".join(ok("generate", "--help").output.split())
    assert "0, not with --top-k or --top-p: always the most probable token." in told
    assert "[default: (0; 1 with --top-k or --top-p);" in told


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
    assert "--stream must come with one prompt, got 2" in refused("generate", "--stream", "a", "b")
    assert "--stream must come without --json, got both" in refused("generate", "--stream", "--json", "a")
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


def test_generate_with_the_model_that_ships() -> None:
    assert ok("generate", "12+7=").stdout == "12+7=19\n"


# logit-error


def test_the_error_of_int8_keys_and_values_is_measured() -> None:
    found = json.loads(ok("logit-error", "12+7=19", "--json").stdout)
    assert 0 < found["mean_error"] < 0.05 and found["tokens"] == 8
    assert (found["exact_kv_bytes"], found["kv_bytes"]) == (2560, 720)
    assert "config must change results by one of" in refused("logit-error", "12+7=19", "--kv-dtype", "auto")
