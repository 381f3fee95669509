"""Within `found_rows`: masks that are true at most once in each row, and which rows they are true in.

chosen = scores.topk(2).indices    # [T, 2], no index twice in a row
mask = chosen == 3                 # [T, 2], true once at most in a row
rows = mask.any(-1)                # [T]
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

VIEWS = ("view", "reshape", "flatten", "contiguous", "clone", "detach", "long", "int")
EQUALS = ("eq", "__eq__")


class DistinctChoices:
    """Of one trace: what is known of its tensors, which are held, so that no other has the id of one of them, and how
    often they were written to when it was found out."""

    def __init__(self) -> None:
        self._chosen: dict[int, tuple[Tensor, int]] = {}  # [.., k], no number twice in a row
        self._masks: dict[int, tuple[Tensor, int]] = {}  # [T, k], true at most once in a row
        self._rows: dict[int, tuple[Tensor, int, Tensor, int]] = {}  # [T], with the mask of whose rows it tells

    def mask_behind(self, rows: Tensor) -> Tensor | None:
        """The mask ``[T, k]`` that is true once in each row that ``rows`` is true for, and in no other."""
        found = self._rows.get(id(rows))
        if found is None:
            return None
        _, version, mask, before = found
        return mask if (rows._version, mask._version) == (version, before) else None

    def note(self, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """What the function of this ``name`` gave for these."""
        if not args or not isinstance(args[0], Tensor):
            return
        given, last = args[0], (-1, args[0].dim() - 1)
        if name == "topk" and (args[2] if len(args) > 2 else kwargs.get("dim", -1)) in last:
            self._chosen[id(result[1])] = held(result[1])
        elif not isinstance(result, Tensor):
            return
        elif name in VIEWS and holds(self._chosen, given) and result.dim() > 1:
            if isinstance(given.shape[-1], int) and result.shape[-1] == given.shape[-1]:
                self._chosen[id(result)] = held(result)
        elif name in EQUALS and holds(self._chosen, given) and isinstance(args[1], int) and given.dim() == 2:
            self._masks[id(result)] = held(result)
        elif name == "any" and holds(self._masks, given) and along_last(args[1:], kwargs):
            self._rows[id(result)] = (*held(result), *held(given))


def along_last(dims: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether these arguments of `any` leave the rows of two dimensions, and nothing else."""
    named = {name: value for name, value in kwargs.items() if (name, value) != ("keepdim", False)}
    return (dims in ((-1,), (1,)) and not named) or (not dims and named in ({"dim": -1}, {"dim": 1}))


def held(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor._version


def holds(known: dict[int, tuple[Tensor, int]], tensor: Tensor) -> bool:
    """Whether it is known of ``tensor``, and nothing was written to it since."""
    found = known.get(id(tensor))
    return found is not None and tensor._version == found[1]
