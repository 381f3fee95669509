"""Decoders of other kinds than Llama, by themselves and eight at once: the engine next to transformers' `generate`.

    python benchmarks/kinds.py --json benchmarks/results/kinds.json
    python benchmarks/kinds.py --kinds zaya minimax

Recurrent layers, hybrids and mixtures, of 16 to 60 million parameters each with random weights in float32; prompts of
16 to 199 tokens, 64 new ones each.  "alone" is the first prompt by itself, "together" all eight: in one batch with
padding in front for `generate`, all there at the start for the engine.  The two take turns, medians of three rounds
after a warm-up.  Prediction before the first run: two to four times as many tokens as a padded batch, and twice as many
alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import selective_compile as sc
from selective_compile.bench.arguments import benchmark_parser, keep, parsed

VOCABULARY, NEW, REQUESTS, ROUNDS = 2000, 64, 8, 3
WIDE: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 512, "num_hidden_layers": 8}
HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**WIDE, **HEADS, "intermediate_size": 1536},
    "mamba2": {**WIDE, "num_heads": 16, "head_dim": 64, "state_size": 64, "n_groups": 1, "chunk_size": 64},
    "minimax": {
        **WIDE,
        **HEADS,
        "intermediate_size": 512,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "block_size": 256,
    },
    "xlstm": {**WIDE, "num_heads": 4},
    "zaya": {**WIDE, **HEADS, "num_experts": 8, "moe_intermediate_size": 512, "router_hidden_size": 64},
    "qwen3_next": {
        **WIDE,
        **HEADS,
        **EXPERTS,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "intermediate_size": 512,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}
QUICK: dict[str, Any] = {"num_hidden_layers": 4}  # of which one of a hybrid is attention
Rate = Callable[[], Any]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS), help="default: all")
    arguments = parsed(parser)
    print(f"{'kind':12}{'million':>8} {'verdict':>10}{'alone':>14}{'together':>16}   tokens a second, of generate")
    rows = [measured(kind, arguments) for kind in arguments.kinds]
    keep(arguments.json, {"rows": rows})


def measured(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    model = random_model(kind, quick=arguments.quick)
    prompts, new = random_prompts(), 4 if arguments.quick else NEW
    ids, mask = padded(prompts)
    config = sc.EngineConfig(compile=arguments.compile)
    options = {"max_new_tokens": new, "do_sample": False}
    ways: dict[str, Rate] = {
        "engine alone": lambda: sc.generate(model, prompts[:1], engine_config=config, **options),
        "generate alone": lambda: model.generate(prompts[0][None], **options),
        "engine together": lambda: sc.generate(model, prompts, engine_config=config, **options),
        "generate together": lambda: model.generate(ids, attention_mask=mask, **options),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + (1 if arguments.quick else ROUNDS)):
        for name, run in ways.items():
            seconds[name].append(timed(run))
    rates = {
        name: new * (REQUESTS if name.endswith("together") else 1) / statistics.median(found[1:])
        for name, found in seconds.items()
    }
    verdict, size = sc.explain(model).verdict, sum(p.numel() for p in model.parameters()) / 1e6
    both = "".join(
        f"{rates[f'engine {how}']:9.0f}{rates[f'engine {how}'] / rates[f'generate {how}']:5.1f}x"
        for how in ("alone", "together")
    )
    print(f"{kind:12}{size:8.1f} {verdict:>10}{both}", flush=True)
    return {"kind": kind, "parameters": size, "verdict": verdict, **rates}


def random_model(kind: str, *, quick: bool) -> Any:
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"))
    config = AutoConfig.for_model(kind, **{**KINDS[kind], **(QUICK if quick else {}), **ends}, pad_token_id=0)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


def random_prompts() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(16, 200, (REQUESTS,), generator=draw).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=draw) for length in lengths]


def padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids and mask, padded in front."""
    ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")
    mask = torch.nn.utils.rnn.pad_sequence(list(map(torch.ones_like, prompts)), batch_first=True, padding_side="left")
    return ids, mask


def timed(run: Rate) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
