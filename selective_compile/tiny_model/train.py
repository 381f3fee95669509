"""Train the model that ships: `python -m selective_compile.tiny_model.train`."""

from __future__ import annotations

import itertools
import math
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Final

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

from selective_compile.tiny_model import path
from selective_compile.tiny_model.corpus import SPELLING, TASKS, Task, documents
from selective_compile.tiny_model.evaluate import Score, every_sum, examination, measure
from selective_compile.tiny_model.tokenizer import BOS, EOS, PAD, VOCAB_SIZE, build, encode

TOKENS_PER_STEP: Final = 1024
SPELLING_STEPS: Final = 400
CHECK_EVERY: Final = 250


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that the weights depend on, besides the code, the processor and the version of torch."""

    steps: int
    seed: int
    learning_rate: float = 6e-3
    weight_decay: float = 0.1
    warmup: int = 100


def new_model(seed: int) -> LlamaForCausalLM:
    """A Llama of a million float32 parameters, with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.06,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


def packed_rows(rng: Random, length: int, tasks: Sequence[Task] = TASKS) -> Iterator[list[int]]:
    """Rows of `length` token ids: documents end to end, `<eos>` after each, the last one cut.

    One document in four goes without `<bos>`, so that a prompt of bare bytes works too.
    """
    source = documents(rng, tasks)
    while True:
        row: list[int] = []
        while len(row) < length:
            ids = encode(next(source).text)
            row += [*(ids if rng.random() < 0.75 else ids[1:]), EOS]
        yield row[:length]


def batches(seed: int) -> Iterator[Tensor]:
    """[rows, length] int64, `TOKENS_PER_STEP` tokens each; few have long rows, which cost more.

    The first `SPELLING_STEPS` hold nothing but letters to copy. Copying is then learnt within 300,000 tokens; from
    the mixture alone it was not after 5 million, and with it most other tasks.
    """
    spelling = packed_rows(Random(seed), 128, (SPELLING,))
    for _ in range(SPELLING_STEPS):
        yield torch.tensor(list(itertools.islice(spelling, TOKENS_PER_STEP // 128)), device="cpu")
    sources = {length: packed_rows(Random(seed + length), length) for length in (128, 256, 1024)}
    for length in itertools.cycle((128, 256, 128, 1024)):
        yield torch.tensor(list(itertools.islice(sources[length], TOKENS_PER_STEP // length)), device="cpu")


def optimizers_of(model: LlamaForCausalLM, recipe: Recipe) -> tuple[Optimizer, ...]:
    """Muon for the layers' matrices, AdamW for embeddings and norms.

    Muon in place of AdamW for all: after 1,200 steps, 0.80 of the sums right in place of 0.70.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    rate, decay = recipe.learning_rate, recipe.weight_decay
    muon = Muon(matrices, lr=rate, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return muon, AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, 0.98))


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a cosine down to 0."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def fit(model: LlamaForCausalLM, recipe: Recipe) -> Iterator[float]:
    """Train in place, yielding the loss of each step."""
    optimizers = optimizers_of(model, recipe)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for step, ids in enumerate(itertools.islice(batches(recipe.seed), recipe.steps)):
        for group in groups:
            group["lr"] = learning_rate(recipe, step)
        # Twice as fast as float32 where the processor multiplies bfloat16; the weights stay float32.
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits  # [B, S, V]
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        yield loss.item()


def train(recipe: Recipe) -> LlamaForCausalLM:
    """A trained model; shows the loss and, now and then, how many of each task's documents it gets right."""
    model = new_model(recipe.seed)
    columns = (TextColumn("loss {task.fields[loss]:.3f}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn()) as progress:
        job = progress.add_task("train", total=recipe.steps, loss=math.nan)
        for step, loss in enumerate(fit(model.train(), recipe), start=1):
            progress.update(job, advance=1, loss=loss)
            if step % CHECK_EVERY == 0:
                scores = measure(model, examination(recipe.seed + 2, 25))
                right = "  ".join(f"{name} {result.accuracy:.0%}" for name, result in scores.items())
                progress.console.print(f"step {step}: {right}", soft_wrap=True)
    return model.eval()


CARD: Final = """\
# A byte-level Llama of a million parameters

Weights trained from nothing, on text that `selective_compile/tiny_model/corpus.py` writes and on no other, by

    python -m selective_compile.tiny_model.train --steps {steps} --seed {seed}

which took {minutes:.0f} minutes with {threads} thread(s) of a shared machine for {tokens:.1f} million tokens
({processor}, torch {torch_version}).

Measured on all sums of two numbers up to 99, those held out of the text apart, and on documents written anew,
long ones as often as short ones. Right: greedy decoding in float32 gives every byte of the answer, then `<eos>`.
Margin: the largest logit less the second largest.

| documents | number | right | median margin | margins under 0.1 |
|---|---|---|---|---|
{rows}
"""


def model_card(recipe: Recipe, scores: Mapping[str, Score], seconds: float) -> str:
    """Where the weights come from and how good they are, in Markdown."""
    rows = [
        f"| {name} | {len(result.right)} | {result.accuracy:.2%} | {result.margins.median():.1f} "
        f"| {result.near_ties:.2%} |"
        for name, result in scores.items()
    ]
    return CARD.format(
        steps=recipe.steps,
        seed=recipe.seed,
        minutes=seconds / 60,
        threads=torch.get_num_threads(),
        tokens=recipe.steps * TOKENS_PER_STEP / 1e6,
        processor=platform.machine(),
        torch_version=torch.__version__,
        rows="\n".join(rows),
    )


def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of 1,024 tokens.")] = 6000,
    seed: Annotated[int, typer.Option(help="Seed of the first weights and of the text.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Cores to use.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Folder to write, if not the package's.")] = None,
) -> None:
    """Train the byte-level Llama that ships, measure it, and write it as a Hugging Face folder."""
    torch.set_num_threads(threads)
    recipe = Recipe(steps=steps, seed=seed)
    began = time.monotonic()
    model = train(recipe)
    seconds = time.monotonic() - began
    card = model_card(recipe, measure(model, every_sum() | examination(seed + 3, 200)), seconds)
    folder = output or path()
    model.save_pretrained(folder)
    build().save_pretrained(folder)
    (folder / "MODEL_CARD.md").write_text(card, encoding="utf-8")
    typer.echo(card)


if __name__ == "__main__":
    typer.run(main)
