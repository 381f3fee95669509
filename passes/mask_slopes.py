"""The linear bias for each head (ALiBi) that masks add to scores, read off the probes of a mask's proof.

In 16 bits a bias that grows with a key's position ends somewhere: in float16, slopes of 0.84 give infinity from
position 78,000 on, and the model's scores are no numbers there.  No line can be proved of them, so a proof reaches as
far as it has looked in front of that.
"""

from __future__ import annotations

import torch

from selective_compile.passes.mask_probes import Masked
from selective_compile.passes.mask_reads import Unproved
from selective_compile.passes.probe import Probe

# By how much a bias may depart from a straight line, in units of the rounding of its largest value.
ROUNDINGS = 4


def slopes_of(call: Masked, probes: list[Probe]) -> tuple[float, ...]:
    """For each query head, the slope of the bias over keys; empty without one.

    A constant for all keys of a query changes none of its weights.
    """
    if not any(probe.heads for probe in probes):
        return ()
    slopes = max((slope_on(probe) for probe in probes if probe.heads), key=lambda found: found[0])[1]
    node = call.masks[0].node
    added = [term.node.meta["val"].dtype for term in call.masks if term.kind == "add"]
    rounding = max(torch.finfo(dtype).eps for dtype in (torch.float32, *added) if dtype.is_floating_point)
    for probe in probes:
        line = -slopes[:, None, None] * probe.distance[:, None]
        bias = probe.bias if probe.heads else torch.zeros_like(line)
        left_out = ~probe.counted[:, None]
        apart = (bias - bias.diagonal(dim1=2, dim2=3)[..., None] - line).masked_fill(left_out, 0)
        most = ROUNDINGS * rounding * bias.masked_fill(left_out, 0).abs().amax((1, 2, 3)).clamp(min=1e-30)
        if not bool((apart.abs().amax((1, 2, 3)) <= most).all()):
            raise Unproved(node, "it adds numbers to the scores that are no linear function of the distance")
    if len(slopes) not in (1, call.query.heads):
        raise Unproved(node, f"it adds {len(slopes)} biases to the scores of {call.query.heads} heads")
    return tuple(slopes.expand(call.query.heads).tolist()) if bool(slopes.any()) else ()


def slope_on(probe: Probe) -> tuple[int, torch.Tensor]:
    """The distance of the furthest pair of a probe, and the slope of each head between its ends."""
    distance = probe.distance.masked_fill(~probe.counted, 0)
    g, i, j = (int(place) for place in torch.unravel_index(distance.argmax(), distance.shape))
    far = int(distance[g, i, j])
    return far, (probe.bias[g, :, i, j] - probe.bias[g, :, i, i]) / -max(far, 1)


def longest_held(probes: list[Probe]) -> int | None:
    """As many tokens as there are up to the last position looked at in front of the first that overflows; None if none
    does."""
    first = min((int(p.positions[p.overflows].min()) for p in probes if bool(p.overflows.any())), default=None)
    if first is None:
        return None
    return 1 + max(int(p.positions.masked_fill(p.positions >= first, -1).max()) for p in probes)
