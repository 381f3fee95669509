"""A request that is searched with several beams: its states in the scheduler, and the step that their logits make."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from selective_compile.runtime.beams import BeamParams, BeamResult, BeamSearch, Moves
from selective_compile.runtime.own_code import Failed, attempt
from selective_compile.runtime.request_state import RequestState, unknown_id


class RequestSearch:
    """Collects the beams' rows of logits, which may come in different steps, and advances the search with all of them.

    Attributes:
        moves: of the next step, once all rows are there; None where the search has ended or failed, too.
        error: what one of the request's own processors or criteria raised, or which token no beam can go on with.
    """

    def __init__(self, state: RequestState, params: BeamParams, *, seed: int, device: torch.device) -> None:
        self._leader = state
        self._search = BeamSearch(params, state.history, seed=seed, device=device)
        self._rows: dict[RequestState, Tensor] = {}
        self.params = params
        self.ready = False
        self.moves: Moves | None = None
        self.error: str | None = None
        # Made with the request, for their numbers follow its own; in the scheduler from the fork on.
        self.others = [
            RequestState(
                state.request_id,
                state.number + place,
                state.tokens,
                max_new_tokens=state.final_length - state.prompt_length + 1,
                terms=state.terms,
                id_offset=state.id_offset,
                known_ids=state.known_ids,
                prefix=state.prefix,
                use_cache=state.use_cache,
                long_form=state.long_form,
            )
            for place in range(1, params.num_beams)
        ]

    def give(self, state: RequestState, row: Tensor) -> None:
        """The logits [V] after all tokens of one of the beams."""
        self._rows[state] = row

    def advance(self, computed: Collection[RequestState]) -> None:
        """Search on, if no beam is left behind.

        Args:
            computed: those that this step computes to their ends.
        """
        members = self._leader.members
        self.ready = all(state.pending == 0 or state in computed for state in members)
        if self.ready:
            rows = torch.stack([self._rows[state] for state in members])
            self._rows.clear()
            asked = attempt("a beam search with its processors and criteria", lambda: self._search.advance(rows))
            if isinstance(asked, Failed):
                self.moves, self.error = None, asked.error
            else:
                self._go_on(asked.result)

    def _go_on(self, moves: Moves | None) -> None:
        unknown = [token for token in moves.tokens if token >= self._leader.known_ids] if moves is not None else []
        self.moves = None if unknown else moves
        self.error = unknown_id(unknown[0], self._leader.known_ids) if unknown else None

    def result(self) -> BeamResult:
        return self._search.result()
