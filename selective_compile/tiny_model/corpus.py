"""The text the shipped model is trained on, written by a seeded generator.

Every document is a prompt and the one answer it has, so that what the model says can be checked by eye and by
test.  Sizes range from one sum (`12+7=`) to lists of several hundred bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

DAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
MONTHS: Final = (
    "january", "february", "march", "april", "may", "june",
    "july", "august", "september", "october", "november", "december",
)  # fmt: skip
LETTERS: Final = tuple("abcdefghijklmnopqrstuvwxyz")
NAMES: Final = ("ann", "bob", "carl", "dora", "emma", "finn", "gina", "hugo")
FRUITS: Final = ("apples", "pears", "plums", "figs", "nuts", "eggs")
NOUNS: Final = (
    ("dog", "dogs"), ("cat", "cats"), ("bird", "birds"), ("fox", "foxes"), ("mouse", "mice"),
    ("child", "children"), ("sheep", "sheep"), ("baby", "babies"), ("woman", "women"), ("horse", "horses"),
    ("goose", "geese"), ("cow", "cows"),
)  # fmt: skip
VERBS: Final = (
    ("runs", "run"), ("sleeps", "sleep"), ("sings", "sing"), ("flies", "fly"), ("watches", "watch"),
    ("eats", "eat"), ("plays", "play"), ("jumps", "jump"), ("goes", "go"), ("cries", "cry"),
    ("swims", "swim"), ("washes", "wash"),
)  # fmt: skip
THINGS: Final = (
    "key", "ring", "book", "coin", "lamp", "shoe", "hat", "cup", "pen", "map",
    "rope", "drum", "kite", "sock", "vase", "comb", "bell", "fork",
)  # fmt: skip
PLACES: Final = ("box", "bag", "drawer", "kitchen", "garden", "car", "tower", "basket", "cellar", "school")
QUALITIES: Final = ("red", "blue", "green", "warm", "cold", "tall", "soft", "round", "quick", "wise")

LARGEST: Final = 99
"""The largest number of a sum."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text: what is given, and what follows from it.  The model ends every document with `<eos>`."""

    task: str
    prompt: str
    answer: str

    @property
    def text(self) -> str:
        return self.prompt + self.answer


def held_out(a: int, b: int) -> bool:
    """Whether the sum of `a` and `b`, in either order, is kept out of the text (about one pair in 20)."""
    low, high = sorted((a, b))
    return (low * 101 + high) * 2654435761 % 2**32 // 65536 % 20 == 0


def _addends(rng: Random) -> tuple[int, int]:
    """Two numbers whose sum may be trained on; short ones more often than their share, which is 1 in 10."""
    while True:
        a, b = (rng.randint(0, LARGEST if rng.random() < 0.75 else 9) for _ in range(2))
        if not held_out(a, b):
            return a, b


def sums(rng: Random, size: int) -> Document:
    """`size - 1` worked sums in brackets, then one to be worked."""
    worked = "".join(f"({a}+{b}={a + b})\n" for a, b in (_addends(rng) for _ in range(size - 1)))
    a, b = _addends(rng)
    return Document(task="sums", prompt=f"{worked}{a}+{b}=", answer=f"{a + b}")


def shopping(rng: Random, size: int) -> Document:
    """Sums in words: `size` people buy something, and the last is asked about."""
    stories = []
    for name in rng.sample(NAMES, size):
        a, b = _addends(rng)
        fruit = rng.choice(FRUITS)
        stories.append((f"{name} has {a} {fruit} and gets {b} more. now {name} has", f" {a + b} {fruit}."))
    given = "".join(f"{prompt}{answer}\n" for prompt, answer in stories[:-1])
    return Document(task="shopping", prompt=given + stories[-1][0], answer=stories[-1][1])


def _sequence(rng: Random, task: str, title: str, items: Sequence[str]) -> Document:
    """A titled run of items, of which some, often none, are given."""
    given = rng.randrange(len(items)) if rng.random() < 0.5 else 0
    pieces = [f" {item}" for item in items]
    return Document(task=task, prompt=f"{title}:{''.join(pieces[:given])}", answer=f"{''.join(pieces[given:])}.")


def counting(rng: Random, size: int) -> Document:
    """Counting up or down by a fixed step."""
    step = rng.choice((1, 1, 1, 2, 5, 10))
    length = min(size + 1, 200 // step)
    start = rng.randint(0, 200 - step * (length - 1))
    numbers = [start + step * i for i in range(length)]
    if rng.random() < 0.3:
        numbers.reverse()
    title = f"count {numbers[0]} to {numbers[-1]}" + (f" by {step}" if step > 1 else "")
    return _sequence(rng, "counting", title, [str(number) for number in numbers])


def letters(rng: Random, size: int) -> Document:
    """A part of the alphabet."""
    start = rng.randint(0, len(LETTERS) - size)
    items = LETTERS[start : start + size]
    return _sequence(rng, "letters", f"letters {items[0]} to {items[-1]}", items)


def calendar(rng: Random, size: int) -> Document:
    """All days or months once round, from a given one; or only the next one."""
    title, names = rng.choice((("days", DAYS), ("months", MONTHS)))
    start = rng.randrange(len(names))
    items = [*names[start:], *names[:start]]
    if size == 1:
        return Document(task="calendar", prompt=f"after {items[0]} comes", answer=f" {items[1]}.")
    return _sequence(rng, "calendar", f"{title} from {items[0]}", items)


def spelling(rng: Random, size: int) -> Document:
    """Some letters, all different, said again: the plainest text on which copying is learnt."""
    said = "".join(rng.sample(LETTERS, size))
    return Document(task="spelling", prompt=f"copy ({said}):", answer=f" {said}.")


def copying(rng: Random, size: int) -> Document:
    """Some words, all different, said again."""
    said = " ".join(rng.sample(THINGS + PLACES + QUALITIES, size))
    return Document(task="copying", prompt=f"copy ({said}):", answer=f" {said}.")


def places(rng: Random, size: int) -> Document:
    """Where `size` things are, and a question about one of them."""
    facts = [(thing, rng.choice(PLACES)) for thing in rng.sample(THINGS, size)]
    told = "".join(f"the {thing} is in the {place}. " for thing, place in facts)
    thing, place = rng.choice(facts)
    return Document(task="places", prompt=f"{told}where is the {thing}?", answer=f" in the {place}.")


def agreement(rng: Random, size: int) -> Document:
    """Sentences in which the noun's number, and with it the verb's, changes."""
    sentences = []
    for (one, many), (does, do) in zip(rng.sample(NOUNS, size), rng.sample(VERBS, size), strict=True):
        single, plural = (f"one {one}", f" {does}."), (f"two {many}", f" {do}.")
        sentences.append((single, plural) if rng.random() < 0.5 else (plural, single))
    given = " ".join(subject + verb for pair in sentences for subject, verb in pair)
    subject, verb = sentences[-1][1]
    return Document(task="agreement", prompt=given.removesuffix(verb), answer=verb)


@dataclass(frozen=True, kw_only=True)
class Task:
    """How often a kind of document is written, and how many items its largest has."""

    write: Callable[[Random, int], Document]
    weight: float
    largest: int


SPELLING: Final = Task(write=spelling, weight=4, largest=26)
TASKS: Final = (
    Task(write=sums, weight=4, largest=40),
    Task(write=shopping, weight=1.5, largest=8),
    Task(write=counting, weight=2, largest=60),
    Task(write=letters, weight=1, largest=26),
    Task(write=calendar, weight=1, largest=2),
    SPELLING,
    Task(write=copying, weight=2, largest=30),
    Task(write=places, weight=1.5, largest=14),
    Task(write=agreement, weight=1, largest=8),
)


def documents(rng: Random, tasks: Sequence[Task] = TASKS) -> Iterator[Document]:
    """Documents without end, short ones more often than long ones; the same for the same `rng`."""
    weights = [task.weight for task in tasks]
    while True:
        task = rng.choices(tasks, weights)[0]
        yield task.write(rng, 1 + int(task.largest * rng.random() ** 2))
