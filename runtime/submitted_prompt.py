"""A prompt as the engine keeps it, before it is known what it asks for."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.request_state import RequestId, RequestState, Terms
from selective_compile.step import LongForm


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A prompt on its terms.

    Attributes:
        block_names: of its full blocks, if blocks are reused.
        deadline: as given.
        shown: what stands for the prompt where others than the model look at it; None: the prompt does.
        id_offset: what is added to the ids of generated tokens where the model looks at them.
        known_ids: it can go on from generated tokens less than this.
        long_form: of the model.
        cut_up_to: of requests of at most so many tokens the prompt may be computed in parts; None: of all.
        prefix: of any prompt, so many first tokens may not.
    """

    prompt: array[int]
    terms: Terms
    block_names: list[bytes]
    deadline: float | None
    cut_up_to: int | None
    prefix: int
    known_ids: int
    shown: array[int] | None = None
    id_offset: int = 0
    long_form: LongForm | None = None

    def is_whole(self, max_new_tokens: int) -> bool:
        """Whether its prompt must be computed in one step."""
        return self.cut_up_to is not None and len(self.prompt) + max_new_tokens - 1 > self.cut_up_to

    def max_positions(self, of_model: int | None) -> int | None:
        """How many tokens it may come to have: as many as the model's requests, or as those of its form."""
        own = None if self.long_form is None else self.long_form.bound(len(self.prompt))
        return min((bound for bound in (of_model, own) if bound is not None), default=None)

    def state(self, request_id: RequestId, number: int, params: GenerationParams) -> RequestState:
        return RequestState(
            request_id,
            number,
            self.prompt,
            max_new_tokens=params.max_new_tokens,
            terms=self.terms,
            block_names=list(self.block_names),
            whole=self.is_whole(params.max_new_tokens),
            prefix=self.prefix,
            shown=self.shown,
            id_offset=self.id_offset,
            known_ids=self.known_ids,
            use_cache=params.use_cache,
            long_form=self.long_form,
        )
