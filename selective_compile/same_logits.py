"""Whether a captured graph gives the logits that its model gives, on a few tokens and with the weights as they are."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import torch
from torch import Tensor, nn

from selective_compile.autocast import without_autocast
from selective_compile.captured import Captured
from selective_compile.graph_writes import GraphWrites
from selective_compile.model_call import logits_call
from selective_compile.model_facts import device_of
from selective_compile.module_state import unchanged
from selective_compile.passes.lengths import CAPTURE_TOKENS
from selective_compile.passes.vmapped import interpreter_of

# Of the difference over the logits, both as lengths of vectors. A model may ask for other operators while it is traced,
# as for a mask that is written out; of these only the rounding differs.
TOLERANCE: Final = {torch.float64: 1e-8, torch.float32: 1e-4}
OF_SIXTEEN_BITS: Final = 5e-2


@torch.no_grad()
def gives_logits_of(captured: Captured, model: nn.Module, written: Collection[int] = ()) -> bool:
    """Runs both once, on `CAPTURE_TOKENS` tokens; what that leaves in the model is gone afterwards.

    Args:
        written: as `written_inputs`; the capture is given copies of these.

    Raises:
        Exception: whatever the model or an operator raises.
    """
    call, arguments = logits_call(model, ids_for(model))
    with unchanged(model):
        expected = call(*arguments)
    given = captured.inputs(arguments)
    given = [each.clone() if place in written else each for place, each in enumerate(given)]
    with without_autocast(device_of(model)):
        results: Any = interpreter_of(captured.module).run(*given)
    found = [result for result in results if isinstance(result, Tensor) and result.shape == expected.shape]
    return len(found) == 1 and agree(found[0], expected)


def written_inputs(captured: Captured, model: nn.Module) -> list[int]:
    """Which inputs a run would change, as a weight that a first run sets up: tried on tensors without numbers.

    Raises:
        Exception: whatever an operator raises.
    """
    _, arguments = logits_call(model, ids_for(model))
    return GraphWrites(captured.module, captured.inputs(arguments)).inputs_written()


def ids_for(model: nn.Module) -> Tensor:
    """[1, `CAPTURE_TOKENS`] different ids, as far as every table of the model has so many rows."""
    rows = min((part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)), default=2)
    return (torch.arange(CAPTURE_TOKENS, device=device_of(model)) * 7 + 1)[None] % rows


def agree(found: Tensor, expected: Tensor) -> bool:
    if found.dtype != expected.dtype:
        return False
    difference = (found.double() - expected.double()).norm()
    return bool(difference <= TOLERANCE.get(found.dtype, OF_SIXTEEN_BITS) * expected.double().norm())
