"""What `tests/test_other_device.py` runs: models on the CPU and on the other device, in a process of its own.

    python -m tests.other_device.cases FOLDER

Prints a line of JSON for each case: its name, and on either device how the model runs and which tokens came out.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import selective_compile as sc
from selective_compile import kept_files
from selective_compile.runtime import batch, model_runner
from tests.decoders import WIDTH, Decoder
from tests.models import tiny
from tests.other_device import device
from tests.runtime.engine_checks import run_until_idle
from tests.runtime.played_stream import PlayedStream
from tests.runtime.test_step_graphs import tiny_mamba2, tiny_mixtral
from tests.test_isolation import Decay, Mixed

CONFIG = sc.EngineConfig(compile=False, token_budget=24, block_size=8, max_kv_tokens=8 * 12, max_requests=5)
PROMPTS = [[random.Random(n).randrange(97) for _ in range(3 + 4 * n)] for n in range(6)]
WANTED: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "seed": 3, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "logprobs": True},
    {"repetition_penalty": 1.4, "suppress_tokens": [1, 2]},
    {"num_beams": 2},
)


class Experts(nn.Module):
    """Loops over the experts that were hit, whose numbers meet tensors of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.layers = nn.Linear(WIDTH, 3), nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        out, mask = torch.zeros_like(rows), nn.functional.one_hot(chosen, 3).permute(2, 1, 0)
        for expert in (mask.sum((-1, -2)) > 0).nonzero():
            places, tokens = torch.where(mask[expert[0]])
            found = self.layers[int(expert[0])](rows[tokens]) * weights[tokens, places, None]
            out.index_add_(0, tokens, found * (1 + expert))
        return x + out.reshape(x.shape)


CASES: dict[str, Callable[[], Any]] = {
    "attention": lambda: tiny("llama", num_hidden_layers=1),
    "experts in one operator": lambda: tiny_mixtral(layers=1),
    "experts in a loop": lambda: Decoder(mix=Experts(), layers=1),
    "recurrence": lambda: tiny_mamba2(layers=1),
    "latents": lambda: tiny("deepseek_v3", num_hidden_layers=1),
    "isolated": lambda: Mixed(Decay),
}


def served(model: nn.Module) -> list[Any]:
    """How it runs, and the tokens of requests that arrive while others run; blocks are so few that some preempt."""
    engine, requests = sc.Engine(model, CONFIG), []
    for prompt, wanted in zip(PROMPTS, itertools.cycle(WANTED)):
        if "num_beams" in wanted and not engine._program.forks_requests:
            wanted = {}
        requests.append(engine.submit(prompt, max_new_tokens=6, **wanted))
        engine.step()
    run_until_idle(engine)
    program = engine._program
    how = [type(program).__name__, list(program.isolated), len(program.call_sites), len(program.state_sites)]
    return how + [[request.tokens, request.finish_reason] for request in requests]


def generated(model: nn.Module) -> list[Any]:
    """By the drop-in, of rows that are padded: what comes back is where the model is."""
    place = next(model.parameters()).device
    ids = torch.tensor([PROMPTS[1], [0, 0, 0, *PROMPTS[1][:-3]]], device=place)
    out = sc.generate(model, ids, attention_mask=(ids != 0).long(), max_new_tokens=4, engine_config=CONFIG, **GENERATED)
    assert {out.sequences.device, *(scores.device for scores in out.scores)} == {place}
    return [out.sequences.tolist()]


GENERATED = {"return_dict_in_generate": True, "output_scores": True, "do_sample": True, "seed": 5}


def main(folder: str) -> None:
    kept = device.add(Path(folder))
    kept_files.cache_folder = lambda: Path(folder)
    for name, make in CASES.items():
        found = []
        for kind in ("cpu", device.NAME):
            played = kind != "cpu"
            if played:
                batch.stream_of = model_runner.stream_of = lambda _: PlayedStream(captures=True)  # type: ignore[assignment]
            torch.manual_seed(0)
            model = make().to(kind)
            found.append(served(model) + (generated(model) if name == "attention" else []))
        print(json.dumps([name, *found]), flush=True)
    assert kept


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
