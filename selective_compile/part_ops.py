"""Operators that stand for the rows of one group among those that are sorted by group, and for all of them again.

Code slices sorted rows at sizes that it reads on the host.  Where such code is traced to be proved, these say which
group a slice is: so they have a shape and no implementation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_library = torch.library.Library("selective", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_library.define("group_part(Tensor rows, Tensor sizes, int group, SymInt size) -> Tensor", tags=_TAGS)
_library.define("joined_parts(Tensor[] parts, SymInt size) -> Tensor", tags=_TAGS)


@torch.library.register_fake("selective::group_part", lib=_library)
def _part(rows: Tensor, sizes: Tensor, group: int, size: int) -> Tensor:
    return rows.new_empty((size, *rows.shape[1:]))


@torch.library.register_fake("selective::joined_parts", lib=_library)
def _joined(parts: Sequence[Tensor], size: int) -> Tensor:
    return parts[0].new_empty((size, *parts[0].shape[1:]))


group_part = torch.ops.selective.group_part.default
joined_parts = torch.ops.selective.joined_parts.default
