"""What is told of the runs: speed, waiting times, memory, and how near the floor they came."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selective_compile.bench.ceilings import Ceilings
from selective_compile.bench.floor import Work, floor_seconds
from selective_compile.bench.peers import Peer, PeerRun
from selective_compile.bench.serving import quantile
from selective_compile.bench.settings import BenchSettings
from selective_compile.bench.trace import Trace

Figures = dict[str, Any]


def result_name(settings: BenchSettings, dtype: str, mode: str) -> str:
    """What a result is called among others in a file."""
    return " ".join([*(["quick"] if settings.quick else []), settings.model, settings.trace, dtype, mode])


def peers_figures(
    peers: Mapping[str, Peer],
    runs: Mapping[str, list[PeerRun]],
    trace: Trace,
    memory: Mapping[str, int],
    floor: tuple[Work, Ceilings] | None,
) -> dict[str, Figures]:
    """Of each peer, medians over the rounds, and quantiles over all requests and tokens of all rounds.

    "engine_ratio": how many times the engine's throughput is that of the peer. `floor`: None where idle time is among
    what was measured.
    """
    medians = {name: statistics.median(run.seconds for run in own) for name, own in runs.items()}
    return {
        name: {
            **peers[name].describe(),
            "rounds_seconds": [run.seconds for run in own],
            "tokens_per_second": trace.new_tokens / medians[name],
            **waiting_times(own),
            **memory_figures(own, memory),
            "engine_ratio": medians[name] / medians["engine"] if "engine" in medians else None,
            "same_tokens_as_generate": agreement(runs, name),
            **(floor_figures(own, *floor) if floor and own[-1].records else {}),
        }
        for name, own in runs.items()
    }


def waiting_times(runs: Sequence[PeerRun]) -> Figures:
    """Seconds: from arrival to the first and to the last token, and from one token of a request to the next.

    A peer that hands out several tokens of a request at a time has gaps of 0 between them. None: there are no gaps,
    where every request has one token.
    """
    requests = [moments for run in runs for moments in run.moments]
    kinds = {
        "latency": [moments[-1] for moments in requests],
        "first_token": [moments[0] for moments in requests],
        "between_tokens": [after - before for moments in requests for before, after in itertools.pairwise(moments)],
    }
    return {
        f"{kind}_{name}": quantile(values, share) if values else None
        for kind, values in kinds.items()
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }


def memory_figures(runs: Sequence[PeerRun], memory: Mapping[str, int]) -> Figures:
    """The peaks of a peer's process above what it had before it loaded the model (`apart/conversation.py`).

    "memory_ratio" is the one while it serves over one copy of the weights and the pool of keys and values: that for
    all requests at their full length, which every peer with a pool is given. None where the system does not tell.
    """
    loading = [run.loading_bytes for run in runs if run.loading_bytes is not None]
    serving = [run.serving_bytes for run in runs if run.serving_bytes is not None]
    return {
        "loading_bytes": max(loading, default=None),
        "serving_bytes": max(serving, default=None),
        "memory_ratio": max(serving) / sum(memory.values()) if serving else None,
    }


def floor_figures(runs: Sequence[PeerRun], work: Work, ceilings: Ceilings) -> Figures:
    """How near a peer whose steps are known came to the least time for them."""
    floors = [floor_seconds(run.records, work, ceilings) for run in runs]
    shares = [floor / run.seconds for floor, run in zip(floors, runs, strict=True)]
    return {
        "steps": len(runs[-1].records),
        "floor_seconds": statistics.median(floors),
        "share_of_floor": statistics.median(shares),
    }


def agreement(runs: Mapping[str, list[PeerRun]], name: str) -> float | None:
    """The share of tokens that are those of `generate`, each request up to its first difference.

    Below 1 where random weights have near ties, which a difference in rounding decides: often, in bfloat16.
    """
    if "generate" not in runs:
        return None
    pairs = list(zip(runs[name][-1].tokens, runs["generate"][-1].tokens, strict=True))
    return sum(common_prefix(*pair) for pair in pairs) / sum(len(theirs) for _, theirs in pairs)


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    same = (one == other for one, other in zip(ours, theirs, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, same))


def stored(path: Path) -> dict[str, Figures]:
    """The results of a file, by name; none if there is no such file.

    Raises:
        ValueError: it is a file of something else.
    """
    if not path.exists():
        return {}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        if all("peers" in result for result in results.values()):
            return dict(results)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
        pass
    raise ValueError(f"--out must be a new file or one of this command, got {str(path)!r}")


def store(path: Path, results: Mapping[str, Figures]) -> None:
    path.write_text(json.dumps({"results": results}, indent=1) + "\n", encoding="utf-8")
