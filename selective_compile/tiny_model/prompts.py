"""Prompts of mixed lengths for the shipped model, with the answers they must get."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from selective_compile.tiny_model.corpus import TASKS, Document

SHORTEST: Final = 5
LONGEST: Final = 400
FEWEST_NEW_TOKENS: Final = 4
MOST_NEW_TOKENS: Final = 120
# The tasks that the model answers without a mistake (its MODEL_CARD.md); what it makes of others is not checked.
MASTERED: Final = frozenset({"sums", "letters", "calendar", "spelling"})


@dataclass(frozen=True, kw_only=True)
class DemoPrompt:
    """A prompt, how many tokens to generate, and the text that greedy decoding must give within them."""

    text: str
    max_new_tokens: int
    answer: str | None
    """What must come, cut at `max_new_tokens` bytes; `None` where more than one continuation is right."""

    def is_right(self, continuation: str) -> bool:
        """Whether `continuation`, without special tokens, is the answer; anything is if there is no one."""
        return self.answer is None or continuation == self.answer


def _closed(document: Document) -> DemoPrompt:
    """All of a document's prompt, so that one answer follows; there is room for the answer's `<eos>`."""
    tokens = min(max(len(document.answer) + 1, FEWEST_NEW_TOKENS), MOST_NEW_TOKENS)
    return DemoPrompt(text=document.prompt, max_new_tokens=tokens, answer=document.answer[:tokens])


def _open(document: Document, rng: Random) -> DemoPrompt:
    """The first half of a document's prompt: the model makes up the rest."""
    half = document.prompt[: max(SHORTEST, len(document.prompt) // 2)]
    return DemoPrompt(text=half, max_new_tokens=rng.randint(FEWEST_NEW_TOKENS, MOST_NEW_TOKENS), answer=None)


def demo_prompts(count: int = 24, seed: int = 0) -> list[DemoPrompt]:
    """`count` prompts of 5 to 400 bytes, 4 to 120 new tokens each, of all tasks in turn.

    Those of tasks that are not mastered are open, and one in 12 of the others.

    Raises:
        ValueError: `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"count must be 1 or more, got {count}")
    rng = Random(seed)
    prompts: list[DemoPrompt] = []
    while len(prompts) < count:
        task = TASKS[len(prompts) % len(TASKS)]
        document = task.write(rng, rng.randint(1, task.largest))
        if SHORTEST <= len(document.prompt) <= LONGEST:
            checked = document.task in MASTERED and len(prompts) % 12 != 11
            prompts.append(_closed(document) if checked else _open(document, rng))
    rng.shuffle(prompts)
    return prompts
