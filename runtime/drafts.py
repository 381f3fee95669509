"""Drafts: tokens that may come next, computed in one step with the last known one and kept as far as they are right.

Which tokens a request gets does not depend on its drafts: each is chosen from its own row of logits, with the request's
processors, criteria and draws, and a draft only decides for how many tokens one step has the rows. So greedy tokens are
the same, and sampled ones are too, draw for draw.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from selective_compile.runtime.assistants import PROBE, Assistant

# What the next token tells of the share that is right, against all before it; over about the last ten.
RECENT = 0.1
UNKNOWN = 0.5
# Tokens that are looked up at most: every n-gram of a prompt is kept, and one of so many is rarely there by chance.
LONGEST_NGRAM = 16


class Acceptance:
    """How long drafts of a request should be, by how many of their tokens were right so far.

    A draft is also looked at where it was not computed: whether its next token would have been right costs nothing to
    find out, so that a request whose drafts do not pay can do without them and take them up again.
    """

    def __init__(self) -> None:
        self.rate = UNKNOWN

    def observe(self, proposed: Sequence[int], tokens: Sequence[int]) -> None:
        """These tokens came where those were proposed."""
        for ours, right in zip(proposed, tokens, strict=False):
            self.rate += RECENT * ((ours == right) - self.rate)
            if ours != right:
                break

    def length(self, worth: float, most: int) -> int:
        """As many tokens as are each right with a probability above `worth`, which a row of a step costs."""
        count, probability = 0, self.rate
        while count < most and probability > worth:
            count, probability = count + 1, probability * self.rate
        return count


class PromptLookup:
    """Proposes what followed the last tokens where they stood before, as transformers' prompt lookup.

    Of the places where the most of the last tokens stand, it takes the latest.
    """

    def __init__(self, *, ngram_size: int) -> None:
        self._size = min(ngram_size, LONGEST_NGRAM)
        self._ends: dict[tuple[int, ...], int] = {}  # of n-grams, where what follows them begins
        self._seen = 0

    def propose(self, tokens: array[int], most: int) -> list[int]:
        """What may follow the tokens, the prompt included, that it saw a beginning of before."""
        for end in range(max(1, self._seen), len(tokens)):
            for size in range(1, min(self._size, end) + 1):
                self._ends[tuple(tokens[end - size : end])] = end
        self._seen = max(self._seen, len(tokens))
        for size in range(min(self._size, len(tokens) - 1), 0, -1):
            start = self._ends.get(tuple(tokens[-size:]))
            if start is not None:
                return tokens[start : start + most].tolist()
        return []


class Drafts:
    """The drafts of one request: what is proposed, and how much of it is worth computing.

    They are by a `drafter` of the request's own, or by an `assistant` for many.
    """

    def __init__(self, drafter: PromptLookup | Assistant, *, most: int) -> None:
        self.drafter = drafter
        self.most = most
        self.acceptance = Acceptance()
        self.proposed: list[int] = []

    def take(self, proposed: list[int], worth: float) -> array[int]:
        """What to compute next of a proposal; empty where it does not pay."""
        self.proposed = proposed
        return array("q", proposed[: self.acceptance.length(worth, self.most)])

    def wanted(self, generated: int, worth: float) -> int:
        """How many tokens to have drafted where drafting costs something by itself."""
        return self.acceptance.length(worth, self.most) or int(generated % PROBE == 0)

    def observe(self, tokens: Sequence[int]) -> None:
        """These tokens came since it proposed."""
        self.acceptance.observe(self.proposed, tokens)
        self.proposed = []
