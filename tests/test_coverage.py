"""The sweep's own judgement: what it builds, what it calls wrong, and that it goes on where it was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from selective_compile import cli
from selective_compile.backend import compile_step_program
from selective_compile.coverage import standing, sweep
from selective_compile.coverage.engine_trial import Served, compare, compared, judged, serve
from selective_compile.coverage.families import DENSE, EXPERTS, NEW, family_of
from selective_compile.coverage.measure import measure
from selective_compile.coverage.oracle import Answer, Oracle, furthest
from selective_compile.coverage.page import page
from selective_compile.coverage.random_model import random_model
from selective_compile.coverage.sizes import VOCABULARY, WINDOW
from selective_compile.coverage.standing import bars, exact, grown, verdict, worse, wrong
from selective_compile.coverage.sweep import Sweep, chosen_types, registered_types, source
from selective_compile.coverage.tiny_config import one_of_each, tiny_config
from selective_compile.coverage.trial import QUICK, Trial, padded_batches
from selective_compile.coverage.worker import last_words

# Tiny models


def test_one_layer_of_each_kind_and_the_last_one_last() -> None:
    assert one_of_each([("a",)] * 5 + [("b",)] + [("a",)]) == [5, 6]
    assert one_of_each([("a", 1), ("a", 2), ("b", 2), ("b", 2)]) == [0, 1, 3]
    assert one_of_each([("a",)] * 4) == [0, 3]


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3_text", "llama4_text", "nemotron_h", "qwen3_next", "zaya", "exaone4"]
)
def test_every_kind_of_layer_is_there(name: str) -> None:
    tiny, full = tiny_config(name), CONFIG_MAPPING[name]()
    assert set(tiny.layer_types) == set(full.layer_types)
    assert len(tiny.layer_types) == tiny.num_hidden_layers <= 4


def test_windows_and_chunks_are_shorter_than_the_prompts() -> None:
    longest = max(map(len, QUICK.prompts(VOCABULARY)))
    assert tiny_config("mistral").sliding_window == WINDOW < longest / 4
    assert tiny_config("llama4_text").attention_chunk_size == WINDOW
    assert tiny_config("qwen2").layer_types == ["full_attention", "sliding_attention"]


def test_keys_are_shared_unless_the_class_has_as_many_as_queries() -> None:
    shared, own = tiny_config("llama"), tiny_config("deepseek_v3")
    assert shared.num_key_value_heads < shared.num_attention_heads
    assert own.num_key_value_heads == own.num_attention_heads


def test_parts_of_a_composite_are_tiny_too() -> None:
    config = tiny_config("gemma3")
    assert config.text_config.hidden_size == config.vision_config.hidden_size == 32
    assert config.image_token_id < config.text_config.vocab_size == VOCABULARY


@pytest.mark.parametrize("name", ["llama", "mamba", "gpt_oss"])
def test_random_models_are_the_same_for_a_seed_and_lively(name: str) -> None:
    one, same, other = (random_model(name, seed=seed) for seed in (1, 1, 2))
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        logits = [model(ids).logits for model in (one, same, other)]
    assert torch.equal(logits[0], logits[1]) and not torch.allclose(logits[0], logits[2], atol=0.1)
    assert 0.2 < float(logits[0].std()) < 5
    norms = [weight for name, weight in one.named_parameters() if "norm" in name]
    assert all(float((weight - 1).abs().max()) > 0.01 for weight in norms)


# The trial


def test_a_trial_has_prompts_from_one_token_to_the_longest() -> None:
    trial = Trial(requests=12)
    lengths = sorted(map(len, trial.prompts(VOCABULARY)))
    assert lengths[0] == 1 and lengths[-1] == trial.longest and len(lengths) == 12
    assert trial.longest > trial.engine_config.token_budget
    assert trial.prompts(VOCABULARY) == Trial(requests=12).prompts(VOCABULARY)


def test_padded_batches_are_padded_on_every_side() -> None:
    masks = {name: mask for name, _, mask in padded_batches(VOCABULARY)}
    assert masks["left"][:, -1].all() and not masks["left"].all()
    assert masks["right"][:, 0].all() and not masks["right"].all()
    first, last = masks["mixed"][:, 0].bool(), masks["mixed"][:, -1].bool()
    assert (first & ~last).any() and (~first & last).any() and (~first & ~last).any()


# Judging answers


class Scripted(Oracle):
    """Says that after any token the next id is the likeliest, id 0 nearly as likely."""

    def __init__(self) -> None:
        pass

    def logits_after(self, prompt: Any, tokens: Any) -> Tensor:
        chosen = [*prompt, *tokens][len(prompt) - 1 : -1]
        return torch.stack([self.row(token) for token in chosen])

    def row(self, token: int) -> Tensor:
        logits = torch.linspace(-1, 1, 10)
        logits[token + 1], logits[0] = 3.0, 3.0 - 1e-5
        return logits

    def generated(self, prompt: Any, count: int) -> Answer:
        tokens = list(range(prompt[-1] + 1, prompt[-1] + 1 + count))
        return Answer(tokens=tokens, logits=self.logits_after(prompt, tokens))


def answered(tokens: list[int], error: float = 0.0) -> Served:
    logits = Scripted().logits_after([1], tokens)
    logits[0, 5] += error
    return Served(prompt=[1], tokens=tokens, logits=logits)


def test_the_same_tokens_and_logits_are_equal() -> None:
    assert compare(answered([2, 3, 4]), Scripted()) == ("equal", 0, 0.0, "")


def test_a_near_tie_is_equal_and_counted() -> None:
    kind, ties, *_ = compare(answered([2, 0, 1]), Scripted())
    assert (kind, ties) == ("equal", 1)


def test_another_token_is_wrong_and_its_place_is_told() -> None:
    kind, _, _, place = compare(answered([2, 7, 8]), Scripted())
    assert kind == "wrong" and place == "prompt of 1, token 1 of 3"
    assert judged([2, 7, 8], Scripted().logits_after([1], [2, 7, 8])) == (0, [1])


def test_the_right_token_after_a_near_tie_is_still_asked_of_the_model() -> None:
    assert compare(answered([2, 0, 5]), Scripted())[0] == "wrong"


def test_other_logits_are_an_error_even_where_the_tokens_are_equal() -> None:
    kind, _, error, _ = compare(answered([2, 3, 4], error=0.01), Scripted())
    assert kind == "equal" and error > 1e-3


def test_what_follows_forward_where_generate_departs_is_told_apart() -> None:
    class Departing(Scripted):
        def generated(self, prompt: Any, count: int) -> Answer:
            answer = super().generated(prompt, count)
            return replace(answer, tokens=[8] * count, logits=answer.logits.flip(1))

    assert compare(answered([2, 3, 4]), Departing())[0] == "as forward"
    assert compare(answered([2, 3, 5]), Departing())[0] == "open"


def test_what_is_open_is_neither_wrong_nor_exact() -> None:
    facts = facts_of(tokens="open", error=1.0)
    assert not wrong(facts) and not exact(facts)


def test_not_a_number_is_never_equal() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    assert furthest(logits * torch.nan, logits) == float("inf")
    assert furthest(logits, logits) == 0


# A model, whole


class Nudged:
    """A step program that shifts what it says of later rows by one: as if their keys were those of another request."""

    def __init__(self, program: Any, rows: int) -> None:
        self.program, self.rows = program, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)

    def __call__(self, inputs: Any, pools: Any, states: Any = ()) -> Tensor:
        logits = self.program(inputs, pools, states)
        return torch.cat([logits[: self.rows], logits[self.rows :].roll(1, -1)])


def test_a_planted_mistake_is_found() -> None:
    model, oracle = random_model("llama"), Oracle("llama")
    program = compile_step_program(model, QUICK.engine_config)
    right = compared(*serve(model, program, QUICK, VOCABULARY), oracle)
    assert right.tokens == "equal" and right.error < 1e-5 and right.preemptions > 0
    mistaken = compared(*serve(model, Nudged(program, 1), QUICK, VOCABULARY), oracle)
    assert mistaken.tokens == "wrong" and mistaken.first_wrong


class Failing(Nudged):
    """One that cannot run the requests of its first step."""

    def take_failed(self) -> dict[Any, Exception]:
        found, self.failed = vars(self).pop("failed", {}), {}
        return found

    def __call__(self, inputs: Any, pools: Any, states: Any = ()) -> Tensor:
        if "failed" not in vars(self):
            self.failed = dict.fromkeys(inputs.requests, ArithmeticError("no such rows"))
        return self.program(inputs, pools, states)


def test_a_request_that_ends_with_an_error_is_no_equal_one() -> None:
    model = random_model("llama")
    program = compile_step_program(model, QUICK.engine_config)
    with pytest.raises(RuntimeError, match="ArithmeticError: no such rows"):
        serve(model, Failing(program, 1), QUICK, VOCABULARY)


def test_all_is_measured_of_a_model() -> None:
    facts: dict[str, Any] = {}
    for part in measure("gemma2", QUICK):
        facts |= json.loads(json.dumps(part))
    assert facts["family"] == DENSE and facts["class"] == "Gemma2ForCausalLM"
    assert verdict(facts) == "ragged" and exact(facts) and not wrong(facts)
    assert facts["causal"] and facts["engine"]["preemptions"] > 0
    assert set(facts["padded"]) == {"left", "right", "mixed"}
    assert ["window 4" in call for call in facts["calls"]] == [True, False]


# Standings


def facts_of(
    name: str = "ragged", *, tokens: str = "equal", error: float = 1e-6, padding: float = 0.0
) -> dict[str, Any]:
    engine = {
        "tokens": tokens,
        "error": error,
        "first_wrong": "token 3",
        "generated": 9,
        "near_ties": 0,
        "preemptions": 2,
    }
    padded = {"left": {"error": padding, "refused": None}}
    shared = {"family": DENSE, "class": "X", "compile_seconds": 2.0, "padded": padded}
    return shared | {"verdict": name, **({"engine": engine} if name != "refused" else {"refusals": []})}


def test_wrong_answers_are_named() -> None:
    assert not wrong(facts_of()) and not wrong(facts_of("refused"))
    assert "other tokens (token 3)" in wrong(facts_of(tokens="wrong"))
    assert "logits" in wrong(facts_of(error=1e-3)) and "padded left" in wrong(facts_of(padding=1.0))
    assert exact(facts_of()) and not exact(facts_of(error=1e-3)) and not exact(facts_of("refused"))


def test_what_becomes_worse_is_noticed() -> None:
    assert not worse(facts_of(), facts_of()) and not worse(facts_of(), facts_of("refused"))
    assert worse(facts_of("refused"), facts_of()) == "ragged has become refused"
    assert worse(facts_of(error=1e-3), facts_of()) == "the engine was exact"
    assert "padded" in worse(facts_of("refused", padding=1.0), facts_of("refused"))
    assert verdict({}) == "not built" and verdict({"class": "X"}) == "failed"


def test_compiling_that_takes_much_longer_is_told() -> None:
    before = facts_of()
    assert not grown(before | {"compile_seconds": 6.9}, before), "less than five seconds more"
    assert not grown({"compile_seconds": 140.0}, {"compile_seconds": 100.0}), "less than half as much again"
    assert not grown(before, {}) and not grown({}, before)
    told = grown(before | {"compile_seconds": 8.0}, before)
    assert told == "compiling takes 8.0 s, took 2.0 s"
    assert f"| llama | {told} |" in page({"types": {"llama": before | {"grown": told}}, "versions": {}})
    assert "there is none" in page({"types": {"llama": before}, "versions": {}})


def test_the_bars_are_counted_and_the_page_shows_them() -> None:
    types = {
        "llama": facts_of(),
        "mixtral": facts_of("refused") | {"family": EXPERTS},
        "gpt2": facts_of(tokens="wrong"),
    }
    same, ragged, _, _, lies = bars(types)
    assert (same[1], ragged[1], lies[1]) == (1, 2, 1) and not lies[3]
    text = page({"types": types, "versions": sweep.versions(sweep.MEASURED)})
    assert "| gpt2 | engine: other tokens (token 3) |" in text
    assert "Wrong without" not in page({"types": {"llama": facts_of()}, "versions": {}}).replace("wrong", "")
    assert "## Mixtures of experts" in text


def test_a_type_of_a_later_release_has_a_family_of_its_own() -> None:
    assert family_of("llama") == DENSE and family_of("a type of 2031") == NEW
    assert [name for name in registered_types() if family_of(name) == NEW] == []


# The sweep


def test_unknown_types_are_refused() -> None:
    assert chosen_types("llama, gpt2") == ("llama", "gpt2")
    with pytest.raises(ValueError, match="registered with AutoModelForCausalLM, got 'lama'"):
        chosen_types("llama,lama")


def test_the_error_of_a_process_is_told_in_a_line(tmp_path: Path) -> None:
    text = tmp_path / "errors.txt"
    text.write_text(
        "Process 1:\nTraceback (most recent call last):\n"
        '  File "/opt/site-packages/torch/a.py", line 12, in f\n    g()\n'
        "torch._dynamo.exc.InternalTorchDynamoError: RuntimeError: sizes differ\n\nwhile at:\n"
        '  File "/home/model.py", line 3, in forward\nUse tlparse to see the graph.\n'
    )
    told = last_words(text, 1)
    assert told["error"].startswith("torch._dynamo.exc.InternalTorchDynamoError: RuntimeError: sizes")
    assert told["source_line"] == "torch/a.py:12"
    text.write_text("")
    assert last_words(text, -9)["error"] == "the process ended with -9"


def test_a_sweep_goes_on_where_it_was_and_outlives_its_processes(tmp_path: Path) -> None:
    seen: list[str] = []
    asked = Sweep(types=("gemma3n", "gpt2"), out=tmp_path / "found.json", jobs=2, trial=QUICK)
    results = asked.run(lambda name, facts: seen.append(name))
    assert sorted(seen) == ["gemma3n", "gpt2"] and verdict(results["types"]["gpt2"]) == "ragged"
    failure = results["types"]["gemma3n"]["failure"]
    assert failure["stage"] == "build" and "ImportError" in failure["error"] and failure["source_line"]
    assert asked.run(lambda name, facts: seen.append(name)) == json.loads(asked.out.read_text())
    assert len(seen) == 2
    results["types"]["gpt2"]["source"] = "another"
    sweep.write(asked.out, results)
    hasty = replace(asked, limit=0.01)
    assert "time limit" in hasty.run(lambda name, facts: seen.append(name))["types"]["gpt2"]["failure"]["error"]
    assert seen[2:] == ["gpt2"]


def test_the_command_fails_on_wrong_tokens_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"gpt2": facts_of("refused"), "llama": facts_of()}
    (tmp_path / "c.json").write_text(
        json.dumps({"versions": {}, "types": {k: v | {"source": source()} for k, v in found.items()}})
    )

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli.app, ["coverage", "--out", str(tmp_path / "c.json"), *arguments])

    good = run("--types", "gpt2,llama")
    assert good.exit_code == 0 and "ragged 1, refused 1" in good.stdout
    assert json.loads(run("--types", "llama", "--json").stdout)["llama"]["class"] == "X"
    assert (tmp_path / "c.md").read_text().startswith("# Coverage")
    monkeypatch.setattr(standing, "wrong", lambda facts: "planted")
    later = json.loads((tmp_path / "c.json").read_text())
    later["types"]["llama"]["grown"] = "compiling takes 9.0 s, took 2.0 s"
    (tmp_path / "c.json").write_text(json.dumps(later))
    assert "llama: compiling takes 9.0 s, took 2.0 s" in run("--types", "gpt2,llama").stdout
    assert json.loads(run("--types", "gpt2,llama", "--new", "--json").stdout) == {}, "nothing is new"
    bad = run("--types", "llama")
    assert bad.exit_code == 1 and "wrong without a refusal for llama" in bad.stderr
    assert run("--types", "lama").exit_code == 1
    assert run("--page", str(tmp_path / "no" / "c.md")).exit_code == 1


def test_a_sweep_that_is_interrupted_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def interrupted(running: Any) -> Any:
        started.extend(running)
        raise KeyboardInterrupt

    monkeypatch.setattr("selective_compile.coverage.sweep.done", interrupted)
    asked = Sweep(types=("gpt2", "llama"), out=tmp_path / "found.json", jobs=2, trial=QUICK)
    with pytest.raises(KeyboardInterrupt):
        asked.run(lambda *_: None)
    assert len(started) == 2 and not any(job.process.is_alive() for job in started)
