"""How often the model gives a document's answer, and by what margin."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selective_compile.tiny_model.corpus import LARGEST, TASKS, Document, held_out
from selective_compile.tiny_model.tokenizer import EOS, PAD, encode


@dataclass(frozen=True, kw_only=True)
class Score:
    """Which documents were answered right, and by what margin each token of the answers was."""

    right: Tensor
    """[documents] bool: every byte of the answer and the `<eos>` after it."""
    margins: Tensor
    """[answer tokens of all documents] float32: largest logit less the second largest."""

    @property
    def accuracy(self) -> float:
        return self.right.float().mean().item()

    @property
    def near_ties(self) -> float:
        """The share of tokens decided by less than 0.1."""
        return (self.margins < 0.1).float().mean().item()


@torch.inference_mode()
def score(model: PreTrainedModel, documents: Sequence[Document], *, batch_size: int = 32) -> Score:
    """Score greedy decoding without decoding.

    An answer is what greedy decoding gives exactly when each of its tokens is the most likely one after the
    prompt and the answer's earlier tokens, so one forward per batch is enough.
    """
    right, margins = [], []
    for start in range(0, len(documents), batch_size):
        batch = documents[start : start + batch_size]
        prompts = [encode(document.prompt) for document in batch]
        rows = [torch.tensor([*encode(document.text), EOS], device="cpu") for document in batch]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)  # [B, S]
        logits = model(input_ids=ids, use_cache=False).logits.float()  # [B, S, V]
        best = logits.topk(2)
        for row, prompt in enumerate(prompts):
            asked = slice(len(prompt) - 1, len(rows[row]) - 1)
            right.append(torch.equal(best.indices[row, asked, 0], rows[row][len(prompt) :]))
            margins.append(best.values[row, asked, 0] - best.values[row, asked, 1])
    return Score(right=torch.tensor(right, device="cpu"), margins=torch.cat(margins))


def examination(seed: int, size: int) -> dict[str, list[Document]]:
    """`size` documents of each task, long ones as often as short ones."""
    rng = Random(seed)
    written = [task.write(rng, rng.randint(1, task.largest)) for task in TASKS for _ in range(size)]
    return {name: list(group) for name, group in itertools.groupby(written, key=lambda one: one.task)}


def every_sum() -> dict[str, list[Document]]:
    """All sums there are, each by itself, those never trained on apart."""
    written: dict[str, list[Document]] = {"all sums, seen": [], "all sums, held out": []}
    for a, b in itertools.product(range(LARGEST + 1), repeat=2):
        name = "all sums, held out" if held_out(a, b) else "all sums, seen"
        written[name].append(Document(task="sums", prompt=f"{a}+{b}=", answer=f"{a + b}"))
    return written


def measure(model: PreTrainedModel, groups: Mapping[str, list[Document]]) -> dict[str, Score]:
    """The score of every group of documents, in float32."""
    was_training = model.training
    scores = {name: score(model.eval(), written) for name, written in groups.items()}
    model.train(was_training)
    return scores
