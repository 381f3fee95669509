"""What `benchmarks/gpu.py` measures, a module for each part, and how it is run.

`jobs` names the jobs of each part and shares out the time, `isolated` runs each in a process of its own (`worker`), so
that a kernel that faults or hangs costs nothing but its job; `rows` is what they tell, `failures` what of an error,
`found` what there is of them so far, `provenance` what it is of, `measures` what the run is to show by them. `floors`
is arithmetic, `timing` the clocks, `profiled` what torch's profiler sees, `models` the shapes, `watching` how a process
ends with its parent and says where it hangs.
`ceilings` (with `launches`), `attention` (with `ragged_step`, `step_check` and, behind it, `kernel_times`; in modules
of their own `mixed`, `kept_otherwise`, `rotary`, `choice`, `joined`, `attention_variants`, `tiles` and
`attention_peers`), `steps` (with `decoding`, `tokens` in front of it and `steps_profiled` behind it), `trace` and
`start` (with `first_token`) are the parts; the last, `drift`, is the ceilings once more.
"""
