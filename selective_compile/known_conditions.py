"""While the model is traced: a condition that is true of every number of tokens is True, and no symbol.

    scaled_dot_product_attention(..., is_causal=mask is None and length > 1)    # of two tokens or more

as decoders of transformers 4.36 to 4.40 and copies of them say: Dynamo keeps ``length > 1`` as a symbol, which no
operator takes for a bool, although it asks no question to answer it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._dynamo.variables import ConstantVariable, SymNodeVariable
from torch.fx.experimental.symbolic_shapes import statically_known_true


@contextmanager
def known_conditions() -> Iterator[None]:
    """For what Dynamo traces within."""
    create = SymNodeVariable.create

    def answered(tx: Any, *arguments: Any, **options: Any) -> Any:
        made = create(tx, *arguments, **options)
        condition = getattr(made, "sym_num", None)
        if isinstance(condition, torch.SymBool):
            for answer, holds in ((True, condition), (False, torch.sym_not(condition))):
                if statically_known_true(holds):
                    return ConstantVariable.create(answer)
        return made

    with mock.patch.object(SymNodeVariable, "create", answered):
        yield
