"""How long a step takes, as far as the steps so far tell."""

from __future__ import annotations

# What a step of a hundred steps ago still counts is a third: the machine or the load may have changed since.
FORGETTING = 0.99


class StepTimes:
    """Seconds of a step as a straight line over its tokens, by least squares over the recent steps."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._tokens_squared = self._product = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._weight = FORGETTING * self._weight + 1
        self._tokens = FORGETTING * self._tokens + num_tokens
        self._seconds = FORGETTING * self._seconds + seconds
        self._tokens_squared = FORGETTING * self._tokens_squared + num_tokens * num_tokens
        self._product = FORGETTING * self._product + num_tokens * seconds

    def predict(self, num_tokens: int) -> float | None:
        """Seconds of a step of so many tokens; None before the first step. More tokens never take less time."""
        if not self._weight:
            return None
        tokens, seconds, slope = self._line()
        return seconds + slope * (num_tokens - tokens)

    @property
    def per_token(self) -> float | None:
        """Seconds of each token more; None as long as steps of one size say nothing about it."""
        return self._line()[2] or None if self._weight else None

    def worth_of_a_row(self, num_tokens: int) -> float:
        """What a token more costs in a step of so many, as a share of what each of those has cost; 0: nothing known.

        A token that need not be computed in a later step saves that share, and a part in the rest of that step.
        """
        step = self.predict(num_tokens)
        return num_tokens * self._line()[2] / step if step else 0.0

    def prefill_seconds(self, num_tokens: int, budget: int) -> float | None:
        """Seconds of the steps of a prompt of so many tokens, by itself; None before the first step."""
        chunks, rest = divmod(num_tokens, budget)
        full, last = self.predict(budget), self.predict(max(1, rest))
        return None if full is None or last is None else chunks * full + last * (rest > 0)

    def _line(self) -> tuple[float, float, float]:
        """A step of the mean size: its tokens and seconds; and the seconds of each token more."""
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = self._tokens_squared / self._weight - tokens * tokens
        common = self._product / self._weight - tokens * seconds
        # Steps of one size say nothing about others: a step of another is taken to last as long.
        slope = max(0.0, common / spread) if spread > 1e-6 * tokens * tokens else 0.0
        return tokens, seconds, min(slope, seconds / tokens)  # the line must not start below 0
