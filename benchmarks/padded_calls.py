"""Padded batches through `torch.compile(model, backend="selective")`, next to Inductor and to the model as it is.

    python benchmarks/padded_calls.py --json benchmarks/results/padded_calls.json

A Llama of 35 million parameters with random weights in float32; eight rows of up to 256 tokens, of all columns so many
real ones.  "logits" of every token; "last": of the last column alone, with padding in front; "score": a number for each
row, of `AutoModelForSequenceClassification`; "loss": of labels.  The three take turns, medians of so many rounds after
a warm-up; "of Inductor" is our time over Inductor's, which computes padding too, and is to come near the share that is
real.  Before anything is timed, what comes out is held to what the model gives.

Prediction before the first run, of a half that is real: 0.55 of Inductor's time for logits, the last and scores; 0.8
for a loss, which reads the logits of all columns three times over, each put back and not compiled.  With all of it
real 1.05 and, of a loss, 1.4.  It takes about five minutes on two quiet cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from selective_compile.bench.arguments import benchmark_parser, keep, parsed

VOCABULARY = 16_000
SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}
QUICK_SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS = ("logits", "last", "score", "loss")
SHARES = (1.0, 0.75, 0.5, 0.25)
TOLERANCE = 1e-3  # of logits of a spread near 1, in float32
Call = Callable[..., Any]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parsed(parser)
    columns, rounds = (32, 1) if arguments.quick else (256, arguments.rounds)
    print(f"{'call':8}{'real':>6}{'eager ms':>10}{'Inductor':>10}{'ours':>8}{'of eager':>10}{'of Inductor':>13}")
    rows = []
    for kind in arguments.kinds:
        torch._dynamo.reset()  # it counts the graphs of all models together
        model = random_model(kind, SHAPE if not arguments.quick else QUICK_SHAPE)
        ways = ways_of(model, compiled=arguments.compile)
        for share in SHARES:
            rows.append(measured(kind, ways, batch(kind, share, columns), rounds))
    keep(arguments.json, {"rows": rows})


def random_model(kind: str, shape: dict[str, int]) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, **shape, num_key_value_heads=4, pad_token_id=0, num_labels=1)
    return (LlamaForSequenceClassification if kind == "score" else LlamaForCausalLM)(config).eval()


def ways_of(model: Any, *, compiled: bool) -> dict[str, Call]:
    """Each graph of either is for all lengths."""
    inductor = "inductor" if compiled else "eager"
    return {
        "eager": model,
        "inductor": torch.compile(model, backend=inductor, dynamic=True),
        "selective": torch.compile(model, backend="selective", options={"inductor": compiled}),
    }


def batch(kind: str, share: float, columns: int) -> dict[str, Any]:
    """Rows [8, columns] of which so much is real, the longest in all: lengths are a power of their places."""
    places = (torch.arange(8) + 0.5) / 8
    lengths = (columns * places ** (1 / share - 1)).round().clamp(min=1)
    lengths[-1] = columns
    mask = (torch.arange(columns)[None] < lengths[:, None]).long()
    if kind == "last":
        mask = mask.flip(1)
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, mask.shape, generator=draw) * mask
    call = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    call |= {"labels": ids.masked_fill(mask == 0, -100)} if kind == "loss" else {}
    return call | ({"logits_to_keep": 1} if kind == "last" else {})


def measured(kind: str, ways: dict[str, Call], call: dict[str, Any], rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        wanted = result(kind, ways["eager"], call)
        for name, way in [*ways.items()] * 2:  # what a graph holds of sizes it may learn at its second call
            error = (result(kind, way, call) - wanted).abs().max().item()
            assert error < TOLERANCE, f"{kind} of {name} is off by {error}"
        for _ in range(rounds):
            for name, way in ways.items():
                start = time.perf_counter()
                way(**call)
                seconds[name].append(time.perf_counter() - start)
    eager, inductor, ours = (1e3 * statistics.median(found) for found in seconds.values())
    real = call["attention_mask"].float().mean().item()
    row = {"call": kind, "real": real, "eager_ms": eager, "inductor_ms": inductor, "selective_ms": ours}
    ratios = f"{ours / eager:10.2f}{ours / inductor:13.2f}"
    print(f"{kind:8}{real:6.2f}{eager:10.0f}{inductor:10.0f}{ours:8.0f}{ratios}", flush=True)
    return row


def result(kind: str, way: Call, call: dict[str, Any]) -> Tensor:
    """What is read of it: of logits those of tokens."""
    found = way(**call)
    if kind == "loss":
        return found.loss
    return found.logits[call["attention_mask"].bool()] if kind == "logits" else found.logits


if __name__ == "__main__":
    main()
