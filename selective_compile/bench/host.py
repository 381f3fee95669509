"""A peer of this package's own environment in a process of its own, as the others are.

    python -m selective_compile.bench.host FILE

The file has a pickled `Hosted`. What goes in and out is as in `apart/conversation.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import PreTrainedModel

from selective_compile.bench.apart.conversation import converse
from selective_compile.bench.checkpoint import Checkpoint
from selective_compile.bench.peers import EnginePeer, Peer
from selective_compile.bench.settings import BenchSettings, PeerName
from selective_compile.bench.trace import Trace
from selective_compile.bench.transformers_peers import CompiledGenerate, GenerateBatch, PaddedGenerate

PEERS_HERE: Final[Mapping[str, Callable[[PreTrainedModel, Trace, BenchSettings], Peer]]] = {
    "engine": EnginePeer,
    "generate": PaddedGenerate,
    "generate_static": CompiledGenerate,
    "generate_batch": GenerateBatch,
}


@dataclass(frozen=True, kw_only=True)
class Hosted:
    """Which peer, and what it is to serve."""

    name: PeerName
    checkpoint: Checkpoint
    trace: Trace
    settings: BenchSettings


class Host:
    """Nothing but the peer, which comes with `load`."""

    def __init__(self, hosted: Hosted) -> None:
        self._hosted = hosted

    def load(self) -> None:
        hosted = self._hosted
        torch.set_num_threads(hosted.settings.threads)
        self._peer = PEERS_HERE[hosted.name](hosted.checkpoint.load(), hosted.trace, hosted.settings)

    def about(self) -> dict[str, Any]:
        return self._peer.describe()

    def serve(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        run = dataclasses.asdict(self._peer.run(Trace.of(requests)))
        return {name: run[name] for name in ("seconds", "tokens", "moments", "records")}


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    hosted = pickle.loads(Path(sys.argv[1]).read_bytes())
    converse(functools.partial(Host, hosted), Host.serve)


if __name__ == "__main__":
    main()
