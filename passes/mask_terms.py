"""What an attention's causal flag and masks allow together, and add to scores: one after another, as it has them."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, fx

from selective_compile.passes.attention_calls import MaskTerm
from selective_compile.passes.mask_reads import Unproved
from selective_compile.passes.score_chain import REPLACED, hidden_from


class MaskTerms:
    """Masks ``[G, heads or 1, L, L]`` are taken in the order of the attention, and then the factors of scores.

    A key is hidden by a score that is replaced by, or to which is added, `REPLACED` or less.  What another term does to
    such a score must not uncover it.
    """

    def __init__(self, allowed: Tensor, *, several: bool, steps: Collection[fx.Node] = ()) -> None:
        """``allowed``: ``[G, L, L]``, the pairs that are there before any; ``several``: there is more than one mask, of
        which one could uncover what another hides; ``steps`` as of `MaskReads`."""
        self.allowed, self._several, self._steps = allowed, several, steps
        groups, length, _ = allowed.shape
        self._bias = torch.zeros(groups, 0, length, length, dtype=torch.float64, device="cpu")
        self._added = torch.zeros(1, 1, 1, 1, dtype=torch.float64, device="cpu")  # to scores that are not replaced
        self._replaced = self._hidden = torch.zeros(1, 1, 1, dtype=torch.bool, device="cpu")

    def take(self, term: MaskTerm, by_head: Tensor) -> None:
        """Raises `Unproved`."""
        kept = self._kept(term, by_head)
        if not bool((kept == kept[:, :1]).all()):
            raise Unproved(term.node, "its mask differs between heads")
        if term.kind == "add":
            self._add(term, by_head, kept)
        else:
            self._replace(term, kept)
        self.allowed = self.allowed & kept[:, 0]

    def take_factor(self, term: MaskTerm, factor: Tensor) -> None:
        """Where it is 0, the score is what the masks add, and hidden if that hides.  Raises `Unproved`."""
        taken = (factor == 0) & (self._added <= REPLACED)
        self.allowed = self.allowed & ~taken.all(1)
        if bool(((factor != 1) & self.allowed[:, None]).any()):
            raise Unproved(term.node, "it multiplies scores that are not hidden")

    def check_hidden(self, node: fx.Node) -> None:
        """Raises `Unproved` where the masks, all of them taken, add up to less than hides."""
        if bool((self._hidden[:, None] & ~(self._added <= REPLACED)).any()):
            raise Unproved(node, "what is added to scores uncovers those that another mask hides")

    @property
    def bias(self) -> Tensor:
        """``[G, heads or 1 or 0, L, L]``: what is added to the scores of allowed pairs."""
        return self._bias.masked_fill(~self.allowed[:, None], 0)

    def _kept(self, term: MaskTerm, value: Tensor) -> Tensor:
        if term.kind == "add":
            return value * term.factor > (REPLACED if term.node in self._steps else hidden_from(value.dtype))
        return value if term.kind == "keep" else ~value

    def _replace(self, term: MaskTerm, kept: Tensor) -> None:
        if bool((~kept & (self._added + term.fill > REPLACED)).any()):
            raise Unproved(term.node, f"what is added to scores that it replaced by {term.fill:g} uncovers them")
        self._replaced = self._replaced | ~kept[:, 0]

    def _add(self, term: MaskTerm, value: Tensor, kept: Tensor) -> None:
        if self._several:
            self._hidden = self._hidden | ~(kept[:, 0] | self._replaced)
            self._added = self._added + (value.double() * term.factor).masked_fill(self._replaced[:, None], 0)
        seen = value.masked_fill(~kept, 0)
        if not bool(seen.any()):
            return
        more, bias = seen.double() if term.factor == 1 else seen.double() * term.factor, self._bias
        self._bias = bias + more if bias.shape[1] else more.expand(bias.shape[0], -1, *bias.shape[2:])
