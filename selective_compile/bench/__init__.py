"""The benchmark: the engine next to transformers' own ways of serving and to other engines, on one checkpoint.

`sizes` and `settings` say what is run, `trace` who asks for what and when, `peers`, `transformers_peers` and `apart`
who serves it, `separate_peers` and `host` in which process, `ceilings` and `floor` what the machine could do at best,
`rounds` runs it all, `figures` says what came of it, `table` and `plots` show it, `machine` notes where.
"""
