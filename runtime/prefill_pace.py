"""How many tokens of prompts go into a step beside requests that decode, so that those do not wait too long."""

from __future__ import annotations

from selective_compile.runtime.step_times import StepTimes

# What prompts add to a step is told by the last few: it grows with the length of the prompt by now.
LEVEL_KEPT = 0.5
# What each token of them adds is told by more steps, as it is the difference between two.
SLOPE_KEPT = 0.95
# Every second chunk is so much shorter, or nothing would tell what a token adds from what a chunk does.
SHORTER = 0.8
# So many steps with prompts, and there is one without, or how long that takes would be guessed from ever farther away.
REMEASURED = 50
FIRST_CHUNK = 16


class PrefillPace:
    """Keeps a step with prompts within `slowdown` times one without, by the seconds that both kinds have taken.

    A chunk is taken to add a time of its own, as for the keys and values of the tokens before it, which are read
    however short it is, and one for each of its tokens. From one step to the next it at most doubles.
    """

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._alone = StepTimes()  # of steps without prompts
        self._last: tuple[int, float] | None = None  # tokens of prompts in a step, and what they added
        self._weight = self._tokens = self._seconds = 0.0  # of the recent ones
        self._squares = self._products = 0.0  # of the differences between one and the next
        self._since = 0  # steps with prompts since the last one without

    def observe(self, *, decoded: int, prefilled: int, seconds: float) -> None:
        """A step has computed so many tokens of requests that decode, and of prompts."""
        if not decoded:
            return
        alone = self._alone.predict(decoded)
        if not prefilled:
            self._alone.observe(decoded, seconds)
            self._since = 0
        elif alone is not None:
            self._learn(prefilled, max(0.0, seconds - alone))
            self._since += 1

    def budget(self, num_decoding: int) -> int:
        """Tokens of prompts for a step beside so many requests; 0: one without is due, to see how long it takes."""
        alone = self._alone.predict(num_decoding)
        if alone is None or self._since >= REMEASURED:
            return 0
        if self._last is None:
            return FIRST_CHUNK
        tokens, added = self._tokens / self._weight, self._seconds / self._weight
        most = 2 * self._last[0]
        slope = self._slope(added / tokens)
        if slope:
            most = min(most, int(tokens + ((self._slowdown - 1) * alone - added) / slope))
        # At least one, so that prompts get on however slow the machine seems to be.
        return max(1, int(most * SHORTER) if self._since % 2 else most)

    def _learn(self, tokens: int, added: float) -> None:
        if self._last is not None:
            more, longer = tokens - self._last[0], added - self._last[1]
            self._squares = SLOPE_KEPT * self._squares + more * more
            self._products = SLOPE_KEPT * self._products + more * longer
        self._last = tokens, added
        self._weight = LEVEL_KEPT * self._weight + 1
        self._tokens = LEVEL_KEPT * self._tokens + tokens
        self._seconds = LEVEL_KEPT * self._seconds + added

    def _slope(self, mean: float) -> float:
        """Seconds that a token more adds; each of a chunk's has added `mean`, with its share of the chunk's own."""
        if not self._squares:
            return mean
        return min(mean, max(0.2 * mean, self._products / self._squares))
