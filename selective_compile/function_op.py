"""The operator that stands for a Python function which capture left whole: `selective::function`.

It exists between capture and the flat graph only: the pass that knows what the function computes replaces it, and what
nobody knows is refused.  So it has a shape and no implementation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_library = torch.library.Library("selective", "FRAGMENT")
_library.define(
    "function(Tensor[] tensors, str name, SymInt[] shape, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.register_fake("selective::function", lib=_library)
def _fake(tensors: Sequence[Tensor], name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return tensors[0].new_empty(shape, dtype=dtype)


function = torch.ops.selective.function.default
