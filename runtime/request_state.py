"""What the scheduler knows of a request: its tokens, how many are computed, its blocks, and its terms."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile

from selective_compile.step import LongForm

RequestId = int | str


@dataclass(frozen=True, kw_only=True)
class Terms:
    """On what terms a request is served.

    Attributes:
        arrival: when it came, in seconds on the engine's clock.
        priority: the larger, the sooner, in the waiting order "priority".
        deadline: when it should have ended, on the engine's clock; infinity: whenever.
        user: whose request it is, for the waiting order "fair".
        cache_salt: requests share blocks only with those of the same salt.
    """

    arrival: float = 0.0
    priority: int = 0
    deadline: float = math.inf
    user: RequestId | None = None
    cache_salt: str | None = None


# Of a request that does not decode, or not by itself, or with a draft.
NOT_CLEAR = -1
NO_BLOCKS = array("i")
# Stands for a token that a step on its way has still to give.
UNKNOWN = -1
ALL = 2**63  # ids, of a model that has an embedding of each
NEVER = 2**62  # tokens, of a request that does not come to have so many


def unknown_id(token: int, known: int) -> str:
    return f"a token must be less than {known} for the model to go on from it, whose embedding has no more, got {token}"


class BlockTable:
    """A request's blocks in one pool: block i holds its tokens from i * block_size.

    The first `gone` were given back, since no token that is still to come sees theirs; their entries are 0.
    `shares_last`: the block that its next token is written to is another's, who may write to it too.
    """

    __slots__ = ("blocks", "gone", "shares_last")

    def __init__(self, blocks: Iterable[int] = (), gone: int = 0) -> None:
        self.blocks = array("i", [0] * gone)
        self.blocks.extend(blocks)
        self.gone = gone
        self.shares_last = False

    @property
    def held(self) -> array[int]:
        return self.blocks[self.gone :] if self.gone else self.blocks


class RequestState:
    """One request as the scheduler and the batch assembly see it; the user's view is `request.Request`.

    `tokens` and the blocks are arrays of machine integers, so that the batch assembly copies slices of them
    without a Python loop. The state is changed by the scheduler alone.
    """

    __slots__ = (
        "block_names",
        "charged",
        "clear_until",
        "computed",
        "draft",
        "final_length",
        "finished",
        "generated_from",
        "group",
        "id_offset",
        "kept",
        "known_ids",
        "long_beyond",
        "long_form",
        "long_from",
        "number",
        "prefix",
        "prompt_length",
        "request_id",
        "reused",
        "rows_from",
        "shares_last",
        "shown",
        "tables",
        "terms",
        "tokens",
        "unknown",
        "use_cache",
        "whole",
        "width",
    )

    def __init__(
        self,
        request_id: RequestId,
        number: int,
        prompt_ids: Iterable[int],
        *,
        max_new_tokens: int,
        terms: Terms | None = None,
        block_names: list[bytes] | None = None,
        whole: bool = False,
        prefix: int = 0,
        shown: array[int] | None = None,
        id_offset: int = 0,
        known_ids: int = ALL,
        use_cache: bool = True,
        long_form: LongForm | None = None,
    ) -> None:
        self.request_id = request_id
        self.number = number  # the order of arrival; also tells two requests apart that used one id in turn
        self.terms = terms or Terms()
        self.tokens = array("q", prompt_ids)  # the prompt, then what was generated
        self.unknown = 0  # how many of the last tokens are not known yet: steps that give them are on their way
        self.prompt_length = len(self.tokens)
        # What stands for the prompt where others than the model look at it; None: the prompt does.
        self.shown = shown
        # What the model takes for a generated token is its id and this.
        self.id_offset = id_offset
        # The request can go on from a generated token less than this: tables have rows for no others.
        self.known_ids = known_ids
        # Whether a model that runs whole has a cache of its own for it.
        self.use_cache = use_cache
        # From this position on, tokens are computed as `generate` steps one behind a prompt; without a cache none is.
        self.generated_from = self.prompt_length if use_cache else NEVER
        if long_form is not None and not use_cache:  # without one, all is computed in each step
            long_form = replace(long_form, anew=True)
        self.long_form = long_form
        # With more tokens than `long_beyond`, of which the last is yet to be computed, it is to be computed anew; from
        # the position `long_from` on its tokens are computed in the long form.
        self.long_beyond, self.long_from = self._form()
        # The most tokens that can come to be computed: the last one to be generated never is.
        self.final_length = self.prompt_length + max_new_tokens - 1
        self.computed = 0  # how many of the tokens have their keys and values in the blocks
        # Up to this token it decodes, one token a step, in a block of its own: nothing is to be seen to before that,
        # and only room then.
        self.clear_until = NOT_CLEAR
        self.reused = 0  # how many tokens were found computed, over all admissions
        self.charged = 0  # how many tokens have been put on the user's account
        self.kept = 0  # how many leading blocks others may find by their names
        self.tables: tuple[BlockTable, ...] = ()  # one for each reach of the model's attention, while it runs
        # Of the content of full blocks, as far as they were asked for, or known before.
        self.block_names = [] if block_names is None else block_names
        self.finished = False
        # Its prompt is computed in one step and what is generated token by token, after a preemption too: in the calls
        # that `generate` makes, for a model of which it is not known that it may be called otherwise.
        self.whole = whole
        # So many of its first positions see one another. Their keys and values are what they were when the prompt was
        # computed, up to there in one step; what is generated in front of it is computed token by token.
        self.prefix = prefix
        self.width = 1  # how many there will be of it once its prompt is computed: `Scheduler.fork`
        self.shares_last = False  # in one of its tables: it has to get a block of its own before it writes
        # Those that are only served all together, this one included: the beams of a search.
        self.group: tuple[RequestState, ...] | None = None

        self.draft = array("q")  # what may come next, to be computed with the last token and then verified
        self.rows_from: int | None = None  # the logits of this token and all behind it are wanted, of the prompt too

    def propose(self, draft: array[int]) -> None:
        """What may come next is to be computed with the last token, as far as there is room for it."""
        if draft or self.draft:  # without one it goes on decoding as it did
            self.draft = array("q", takewhile(self.known_ids.__gt__, draft))
            self.clear_until = NOT_CLEAR

    def expect(self) -> None:
        """One more token, which a step on its way gives."""
        self.tokens.append(UNKNOWN)
        self.unknown += 1

    def learn(self, token: int) -> None:
        """The first of the tokens that were not known."""
        self.tokens[-self.unknown] = token
        self.unknown -= 1

    def settle(self) -> None:
        """Nothing is expected any more."""
        if self.unknown:
            del self.tokens[-self.unknown :]
            self.computed = min(self.computed, len(self.tokens))
            self.unknown = 0
            if self.long_form is not None and not self.computed:
                self.choose_form()

    @property
    def outgrown(self) -> bool:
        """Whether nothing that was computed of it is of use, since it has grown into the long form."""
        return len(self.tokens) > self.long_beyond

    @property
    def began_anew(self) -> bool:
        return self.long_form is not None and self.long_from == 0 and not self.long_form.has(self.prompt_length)

    def choose_form(self) -> None:
        """That of a request of as many tokens, of which nothing is computed: it has no blocks."""
        before = self.long_from
        self.long_beyond, self.long_from = self._form()
        if self.long_from != before:
            self.block_names = []

    def _form(self) -> tuple[int, int]:
        form = self.long_form
        if form is None:
            return NEVER, NEVER
        if form.has(len(self.tokens) if form.anew else self.prompt_length):
            return NEVER, 0
        return (form.beyond, NEVER) if form.anew else (NEVER, form.beyond)

    @property
    def members(self) -> tuple[RequestState, ...]:
        """Those that are admitted, preempted and removed with it, the first one for all; itself alone in most cases."""
        return self.group or (self,)

    @property
    def history(self) -> array[int]:
        """What its processors, criteria and beams see of its tokens; not to be changed."""
        return self.tokens if self.shown is None else self.shown + self.tokens[self.prompt_length :]

    def taken(self, tokens: array[int], start: int) -> array[int]:
        """What the model takes for `tokens`, which stand from `start` on."""
        generated = max(0, self.prompt_length - start)
        return tokens[:generated] + array("q", [token + self.id_offset for token in tokens[generated:]])

    @property
    def blocks(self) -> array[int]:
        """Those of the first table: of the attention that sees farthest."""
        return self.tables[0].blocks if self.tables else NO_BLOCKS

    @property
    def pending(self) -> int:
        """Tokens still to compute; the request is sampled in the step that computes the last of them."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def least_at_once(self) -> int:
        """Tokens that its next share has at least."""
        if self.computed:
            return 1
        return self.prompt_length if self.whole else max(1, min(self.prefix, self.prompt_length))

    @property
    def most_at_once(self) -> int:
        """Tokens that its next share has at most."""
        if self.computed == 0:
            return self.prompt_length if self.whole or self.prompt_length < self.prefix else self.pending
        return 1 if self.whole or self.computed < self.prefix else self.pending

    @property
    def shares_blocks(self) -> bool:
        """Whether what its full blocks hold depends on nothing but what they are named by."""
        return self.prompt_length >= self.prefix

    @property
    def awaits_its_last(self) -> bool:
        """Whether all that may come to be computed of it is, but for its last token being known."""
        return self.unknown > 0 and self.computed >= self.final_length

    @property
    def in_prefill(self) -> bool:
        """Whether more than the token that was generated last is to be computed."""
        return self.pending > 1 or self.computed < self.prompt_length

    def __repr__(self) -> str:
        return (
            f"RequestState({self.request_id!r}, number={self.number}, prompt_length={self.prompt_length}, "
            f"tokens={len(self.tokens)}, computed={self.computed}, blocks={list(self.blocks)})"
        )
