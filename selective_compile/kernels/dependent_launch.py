"""Programmatic dependent launch: a kernel is set up, and begins, while the one in front of it in the stream still runs.

Kernels here that have a parameter ``PDL`` wait (``gdc_wait``) until all kernels in front of them are complete and what
these wrote can be read. Every program does, so that a kernel that is complete says the same of all in front of it.
Only then a program gives the next kernel leave to begin (``gdc_launch_dependents``), and does at once: the next one
begins when all programs have, so that none of them waits for a place that it takes, and waits for their results itself
(CUDA C++ Programming Guide, "Programmatic Dependent Launch").  Where attention gave leave behind its keys, the launch
of the merge was not hidden: a layer of decoding took an H200 up to 1.5 us longer.

A kernel of another library that is launched so behind one of these has to wait, too, before it reads or writes.

What a kernel reads before it waits, past the first-level cache, must have been written before the kernel in front
began: how a step's attention is cut is (`split_plan_triton`), since the launch that writes keys lies between. By
waiting, that one has seen to it that the plan is complete.

It hides the time between two kernels: in a graph, one that does next to nothing comes 1.4 us behind another, and 0.7
where it begins early (H200).
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def begins_early(device: torch.device) -> bool:
    """Whether a launch can ask for it: from Hopper on (compute capability 9.0)."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(early: bool) -> dict[str, bool]:
    """Of a launch of a kernel with that ``PDL``; what is not CUDA has no such option."""
    return {"launch_pdl": True} if early else {}
