"""Types that the package knows nothing of: registered as a later release would, or as code beside a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

import selective_compile as sc
from selective_compile import checkpoints, cli, tiny_model
from selective_compile.backend import StepProgram, compile_step_program, report_of
from tests.exactness import engine_error
from tests.own_code.configuration_own import OwnConfig
from tests.own_code.modeling_own import FORMS, OwnForCausalLM

OWN_CODE = Path(__file__).parent / "own_code"
AUTO = {
    "auto_map": {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
}
PROMPTS = [[1, 5, 7], [9], [2, 9, 22, 33, 4, 8, 15, 16, 23, 42, 3]]
NEW = 6


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    AutoConfig.register("own_decoder", OwnConfig, exist_ok=True)
    AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM, exist_ok=True)


def own(form: str) -> Any:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("own_decoder", form=form)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=1.4 * weight.shape[-1] ** -0.5)
    model.generation_config.pad_token_id = 0
    return model


def alone(model: Any) -> list[list[int]]:
    rows = [torch.tensor([prompt]) for prompt in PROMPTS]
    options = {"max_new_tokens": NEW, "do_sample": False, "use_cache": False}
    return [model.generate(row, **options)[0].tolist() for row in rows]


@pytest.mark.parametrize("form", FORMS)
def test_a_type_of_a_later_release_is_exact_and_its_attention_proved(form: str) -> None:
    model = own(form)
    config = sc.EngineConfig(token_budget=7, block_size=4, compile=False)
    program = compile_step_program(model, config)
    report = report_of(program, model)
    assert report.verdict == ("isolated" if form == "running_mean" else "ragged"), str(report)
    engine = sc.Engine(model, config, program=program)
    requests = [engine.submit(prompt, max_new_tokens=NEW, do_sample=False) for prompt in PROMPTS]
    assert [[*prompt, *each.result().tokens] for prompt, each in zip(PROMPTS, requests, strict=True)] == alone(model)
    if report.verdict == "ragged":
        assert isinstance(program, StepProgram)
        assert engine_error(model, vocabulary=101, program=program) < 1e-4
    else:
        assert "modeling_own.py" in str(report)
        with pytest.raises(ValueError, match="modeling_own.py"):
            sc.Engine(model, sc.EngineConfig(compile=False, fallback="refuse"))
    if form == "windows":
        assert [call.mask for call in report.calls] == ["causal, window 3", "causal, window 7"]


def test_a_configuration_that_generate_makes_no_cache_of_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = own("running_mean")
    monkeypatch.setattr(OwnConfig, "attribute_map", {})  # without it, there is no number of layers by the usual name
    with pytest.raises(AttributeError, match="num_hidden_layers"):
        model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=2)
    assert sc.explain(model).verdict == "isolated"  # which needs no cache
    config = sc.EngineConfig(compile=False)
    assert [row.tolist() for row in sc.generate(model, PROMPTS, max_new_tokens=NEW, engine_config=config)] == alone(
        model
    )
    model.layers[0].register_forward_hook(lambda *_: None)
    report = sc.explain(model)
    assert report.verdict == "refused" and "`generate` must be able to begin with OwnForCausalLM" in str(report)
    with pytest.raises(ValueError, match="must be able to begin with OwnForCausalLM, got AttributeError: .*num_hidden"):
        sc.Engine(model, config)


# Code beside a checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose `config.json` names code of its own; the tokenizer is that of the model that ships."""
    target = tmp_path_factory.mktemp("own")
    shutil.copytree(tiny_model.path(), target, dirs_exist_ok=True)
    for file in target.glob("*.safetensors"):
        file.unlink()
    config = OwnConfig(form="shared_keys", symbols=320)
    torch.manual_seed(1)
    model = OwnForCausalLM(config).eval()
    model.save_pretrained(target)
    written = json.loads((target / "config.json").read_text())
    # A type that is registered nowhere: only the code beside it says what it is.
    (target / "config.json").write_text(json.dumps(written | AUTO | {"model_type": "own_elsewhere"}))
    for name in ("configuration_own.py", "modeling_own.py"):
        text = (OWN_CODE / name).read_text()
        (target / name).write_text(text.replace('"own_decoder"', '"own_elsewhere"'))
    return target


def test_code_beside_a_checkpoint_runs_only_if_it_is_trusted(folder: Path) -> None:
    with pytest.raises(ValueError, match="trust_remote_code must be true .*modeling_own.OwnForCausalLM"):
        checkpoints.load(str(folder))
    refused = CliRunner().invoke(cli.app, ["explain", "--model", str(folder)])
    assert refused.exit_code == 1 and "--trust-remote-code" in refused.stderr


def test_a_model_of_trusted_code_is_proved_and_exact(folder: Path) -> None:
    checkpoint = checkpoints.load(str(folder), trust_remote_code=True)
    model: Any = checkpoint.model
    assert type(model) is not OwnForCausalLM and type(model).__module__.startswith("transformers_modules")
    found = [
        r.tolist()
        for r in sc.generate(model, PROMPTS, max_new_tokens=NEW, engine_config=sc.EngineConfig(compile=False))
    ]
    assert found == alone(model) and sc.explain(model).verdict == "ragged"


def test_the_commands_take_trusted_code(folder: Path) -> None:
    told = CliRunner().invoke(cli.app, ["explain", "--model", str(folder), "--trust-remote-code", "--json"])
    assert told.exit_code == 0 and json.loads(told.stdout)["verdict"] == "ragged"
    options = ["--model", str(folder), "--trust-remote-code", "--max-new-tokens", "3", "--json"]
    assert CliRunner().invoke(cli.app, ["generate", *options, "12+7="]).exit_code == 0
