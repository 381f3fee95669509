"""What `benchmarks/gpu.py` measures, a module for each part, and how it is run.

`jobs` names the jobs of each part and shares out the time, `isolated` runs each in a process of its own (`worker`), so
that a kernel that faults or hangs costs nothing but its job; `rows` is what they tell, `failures` what of an error,
`found` what there is of them so far, `provenance` what it is of, `measures` what the run is to show by them. `floors`
is arithmetic, `timing` the clocks, `models` the shapes.
`ceilings`, `attention` (with `ragged_step` and `step_check`; in modules of their own `mixed`, `kept_otherwise`,
`rotary`, `choice`, `joined`, `attention_variants` and `attention_peers`), `steps` (with `decoding`, `tokens` in front
of it and `steps_profiled` behind it), `trace` and `start` (with `first_token`) are the parts; the last, `drift`, is the
first once more.
"""
