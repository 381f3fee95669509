"""The shipped model: its text, its tokenizer, its answers and its training."""

from __future__ import annotations

import itertools
import re
import socket
from pathlib import Path
from random import Random

import pytest
import torch
import typer
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from typer.testing import CliRunner

from selective_compile import tiny_model
from selective_compile.tiny_model import train
from selective_compile.tiny_model.corpus import TASKS, Document, documents, held_out
from selective_compile.tiny_model.evaluate import every_sum, examination, score
from selective_compile.tiny_model.prompts import DemoPrompt, demo_prompts
from selective_compile.tiny_model.tokenizer import BOS, EOS, build, encode

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socket", _no_network)
        return tiny_model.load()


def _no_network(*arguments: object) -> socket.socket:
    raise AssertionError("the shipped model must load without a network")


def _continuation(loaded: Loaded, text: str, max_new_tokens: int) -> str:
    model, tokenizer = loaded
    prompt = tokenizer(text, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(tokens[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)


def _sum(a: int, b: int) -> Document:
    return Document(task="sums", prompt=f"{a}+{b}=", answer=f"{a + b}")


# The text


def test_documents_depend_on_the_seed_alone() -> None:
    first, again, other = (list(itertools.islice(documents(Random(seed)), 100)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert {document.task for document in first} == {task.write.__name__ for task in TASKS}


def test_every_written_sum_is_right_and_none_is_held_out() -> None:
    text = "\n".join(document.text for document in itertools.islice(documents(Random(0)), 3000))
    figures = re.findall(r"(\d+)\+(\d+)=(\d+)", text)
    words = re.findall(r"has (\d+) \w+ and gets (\d+) more\. now \w+ has (\d+)", text)
    assert len(figures) > 3000 and len(words) > 300
    for a, b, total in figures + words:
        assert int(a) + int(b) == int(total)
        assert not held_out(int(a), int(b))


def test_about_one_sum_in_twenty_is_held_out_in_both_orders() -> None:
    pairs = list(itertools.product(range(100), repeat=2))
    assert 0.04 < sum(held_out(a, b) for a, b in pairs) / len(pairs) < 0.06
    assert all(held_out(a, b) == held_out(b, a) for a, b in pairs)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.write.__name__)
@pytest.mark.parametrize("seed", range(20))
def test_a_prompt_has_one_answer_at_every_size(task: object, seed: int) -> None:
    kind = next(one for one in TASKS if one is task)
    for size in (1, kind.largest):
        document = kind.write(Random(seed), size)
        assert document.prompt and document.answer and document.text.isascii()
        assert len(encode(document.text)) < 700


# The tokenizer


def test_ids_are_bytes(loaded: Loaded) -> None:
    text = "".join(map(chr, range(0x250))) + "12+7=19\n  日本 🙂"
    _, tokenizer = loaded
    assert tokenizer(text).input_ids == [BOS, *text.encode()] == encode(text)
    assert tokenizer.decode(encode(text), skip_special_tokens=True) == text
    assert tokenizer.decode([*encode("a ."), EOS]) == "<bos>a .<eos>"


def test_the_shipped_tokenizer_is_the_one_the_code_builds(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    text = "count 3 to 6: 3 4 ü"
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == encode(text)
    assert (tmp_path / "tokenizer.json").read_text() == (tiny_model.path() / "tokenizer.json").read_text()


# The weights


def test_it_is_a_llama_of_a_million_parameters(loaded: Loaded) -> None:
    model, _ = loaded
    assert model.config.model_type == "llama"
    assert 0.9e6 < model.num_parameters() < 1.2e6
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (tiny_model.path() / "model.safetensors").stat().st_size < 6e6
    assert not model.training


def test_answers_by_eye(loaded: Loaded) -> None:
    assert _continuation(loaded, "12+7=", 8) == "19"
    assert _continuation(loaded, "95+88=", 8) == "183"
    assert _continuation(loaded, "letters c to g:", 30) == " c d e f g."
    assert _continuation(loaded, "after monday comes", 30) == " tuesday."


def test_sums_are_right_held_out_ones_too(loaded: Loaded) -> None:
    for written in every_sum().values():
        assert score(loaded[0], Random(0).sample(written, 500), batch_size=250).accuracy > 0.99


def test_a_prompt_without_bos_works_too(loaded: Loaded) -> None:
    model, tokenizer = loaded
    ids = torch.tensor([list(b"(3+4=7)\n12+7=")])
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert tokens[0, ids.shape[1] :].tolist() == [*b"19", EOS]


def test_margins_are_clear(loaded: Loaded) -> None:
    result = score(loaded[0], [one for group in examination(9, 5).values() for one in group])
    assert result.margins.median() > 2
    assert result.near_ties < 0.03


def test_the_score_is_that_of_greedy_decoding(loaded: Loaded) -> None:
    written = [*(_sum(a, 88) for a in (1, 17, 99)), Document(task="sums", prompt="1+1=", answer="3")]
    decoded = [_continuation(loaded, document.prompt, 5) == document.answer for document in written]
    assert score(loaded[0], written, batch_size=3).right.tolist() == decoded == [True, True, True, False]


# The prompts


def test_demo_prompts_are_of_mixed_lengths() -> None:
    prompts = demo_prompts(32, seed=1)
    lengths = sorted(len(prompt.text) for prompt in prompts)
    assert 5 <= lengths[0] < 20 and 250 < lengths[-1] <= 400
    assert all(4 <= prompt.max_new_tokens <= 120 for prompt in prompts)
    assert 10 < sum(prompt.answer is not None for prompt in prompts) < 30
    assert prompts == demo_prompts(32, seed=1) != demo_prompts(32, seed=2)


def test_demo_prompts_get_their_answers(loaded: Loaded) -> None:
    checked = [prompt for prompt in demo_prompts() if prompt.answer is not None]
    right = [p.is_right(_continuation(loaded, p.text, p.max_new_tokens)) for p in checked]
    assert len(right) > 8 and all(right)


def test_an_open_prompt_takes_any_answer_and_a_closed_one_only_its_own() -> None:
    assert DemoPrompt(text="the key", max_new_tokens=9, answer=None).is_right("anything")
    closed = DemoPrompt(text="1+1=", max_new_tokens=4, answer="2")
    assert closed.is_right("2") and not closed.is_right("3")


def test_no_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="count must be 1 or more, got 0"):
        demo_prompts(0)


# The training


def test_batches_spell_first_and_hold_whole_documents_from_the_start_of_each_row() -> None:
    first = list(itertools.islice(train.batches(0), train.SPELLING_STEPS + 4))
    shapes = [tuple(batch.shape) for batch in first[-4:]]
    assert shapes == [(8, 128), (4, 256), (8, 128), (1, 1024)]
    for row in first[-1].tolist() + first[-2].tolist():
        starts = [i for i, token in enumerate(row) if token == BOS]
        assert (EOS in row or len(row) < 1024) and all(i == 0 or row[i - 1] == EOS for i in starts)
    spelt = bytes(token for token in first[train.SPELLING_STEPS - 1].flatten().tolist() if token < 256)
    assert spelt.count(b"copy (") > 8 and b"=" not in spelt


def test_the_learning_rate_warms_up_and_ends_at_zero() -> None:
    recipe = train.Recipe(steps=1000, seed=0, learning_rate=1.0, warmup=100)
    rates = [train.learning_rate(recipe, step) for step in range(1001)]
    assert rates[0] == pytest.approx(0.01) and max(rates) == rates[99] == 1.0
    assert rates[1000] == pytest.approx(0.0) and rates[550] == pytest.approx(0.5)


def test_training_lowers_the_loss_and_repeats_itself() -> None:
    recipe = train.Recipe(steps=5, seed=0, warmup=1)
    first = list(train.fit(train.new_model(0), recipe))
    assert first == list(train.fit(train.new_model(0), recipe))
    assert first[-1] < first[0] - 1


def test_the_command_has_help() -> None:
    app = typer.Typer()
    app.command()(train.main)
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0 and "--steps" in result.output
