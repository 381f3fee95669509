"""What options of generation cost on 110.5 million parameters: sampling, JSON schemas, prompt lookup, batch invariance.

    python benchmarks/generation_costs.py --json costs.json

Three tables, each of ways that take turns in every round on engines that share one compiled program, as the median over
the rounds of the time of a way over that of the first one in its round.

Choosing tokens: 64 requests with all vectorised sampling fields set (temperature, top_k, top_p, min_p, repetition
penalty, suppressed tokens, minimum length), and with a JSON schema each, over greedy. The bars: 5 % and 10 % more.

Prompt lookup: 8 requests with `prompt_lookup_num_tokens` over the same without, tokens compared. The weights are made
so that what comes next is known: embeddings are large beside what the layers add, and the LM head's row of each token
is the embedding of the one that it follows, so that the model walks along cycles, at the price of a forward like any
other. On "copying" each prompt goes once around a cycle of 48 tokens and the answer goes around it again; on "nothing
repeats" the cycle is longer than the answer; on "misleading" too, and every token of the answer stands in the prompt
before another one. The bars: copying at least 1.8 times as fast, the second at most 3 % slower.

Batch invariance, in float32: 64 requests with `batch_invariant=True` over without, once generating and once with
prompts of 256 tokens and one token each. There is no bar; what it costs is to be known.

Prediction before the first run: sampling 4 % (some 3 ms a step of 64 rows of 32,000 scores), JSON 8 %; lookup 3 times
as fast on copying, 1 % slower where nothing repeats, 2 % where it misleads.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from selective_compile.backend import Program, compile_step_program
from selective_compile.bench.arguments import benchmark_parser, keep, parsed
from selective_compile.bench.serving import random_decoder
from selective_compile.bench.settings import DecoderShape, chosen
from selective_compile.bench.walking import CYCLE, cycles, walking
from selective_compile.options import EngineConfig
from selective_compile.runtime import Engine

SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 10_000}
DRAFT = 8
LONG = 256  # tokens of a prompt, where prompts are what is timed
MLP = 1536  # in place of 2048, with which the Llama of the benchmarks has 125 million parameters
BARS = {"sampled": 1.05, "json schema": 1.10, "copying": 1 / 1.8, "nothing repeats": 1.03}


@dataclass(frozen=True, kw_only=True)
class Answered:
    """By a run of one way: the tokens of each request, and how many steps they took."""

    tokens: list[list[int]]
    steps: int


Ways = Mapping[str, Callable[[], Answered]]


def main() -> None:
    arguments = _arguments()
    shape = replace(chosen(quick=arguments.quick).shape, mlp=MLP)
    if arguments.quick:
        shape = DecoderShape(hidden=64, layers=2, heads=4, kv_heads=2, mlp=128, vocabulary=2048, positions=256)
    model = random_decoder(shape).to(getattr(torch, arguments.dtype))
    config = EngineConfig(max_requests=64, max_kv_tokens=64 * 512, block_reuse=False, compile=arguments.compile)
    own = compile_step_program(model, config)
    found, _ = ratios(choosing(model, config, own, shape, arguments), arguments.rounds, same_tokens=False)
    steps: dict[str, float] = {}
    known = compile_step_program(walking(model), config)
    for task in ("copying", "nothing repeats", "misleading"):
        ways = lookup(model, config, known, shape, arguments, task)
        times, counts = ratios(ways, arguments.rounds, same_tokens=True)
        found[task], steps[task] = times["lookup"], counts["lookup"]
    if arguments.dtype == "float32" and arguments.compile:  # refused by name else
        invariant = replace(config, batch_invariant=True)
        engines = {
            "ordinary": Engine(model, config, program=own),
            "invariant": Engine(model, invariant, program=compile_step_program(model, invariant)),
        }
        for task in ("invariant decoding", "invariant prompts"):
            ways = invariance(engines, shape, arguments, task)
            found[task] = ratios(ways, arguments.rounds, same_tokens=False)[0]["invariant"]
    for name, ratio in found.items():
        bar = f"bar {BARS[name]:.2f}: {'met' if ratio <= BARS[name] else 'MISSED'}" if name in BARS else ""
        print(f"{name:18} {ratio:6.3f} of the time without  {bar}", flush=True)
    sizes = {name: getattr(arguments, name) for name in ("dtype", "requests", "prompt", "new", "rounds")}
    keep(arguments.json, {"threads": torch.get_num_threads(), **sizes, "bars": BARS, "ratios": found, "steps": steps})


def ratios(ways: Ways, rounds: int, *, same_tokens: bool) -> tuple[dict[str, float], dict[str, float]]:
    """The median over the rounds of each way's time over that of the first, and its steps over those of the first."""
    first = next(iter(ways))
    measured: dict[str, list[float]] = {name: [] for name in ways if name != first}
    for turn in range(rounds + 1):
        times, answered = {}, {}
        for name, run in ways.items():
            started = time.perf_counter()
            answered[name] = run()
            times[name] = time.perf_counter() - started
        if same_tokens and any(each.tokens != answered[first].tokens for each in answered.values()):
            raise AssertionError("tokens differ with drafts")
        for name, kept in measured.items():
            if turn:  # the first warms up
                kept.append(times[name] / times[first])
    steps = {name: each.steps / answered[first].steps for name, each in answered.items()}
    return {name: statistics.median(kept) for name, kept in measured.items()}, steps


def choosing(
    model: PreTrainedModel, config: EngineConfig, program: Program, shape: DecoderShape, arguments: argparse.Namespace
) -> Ways:
    draw = random.Random(0)
    vocabulary = shape.vocabulary
    prompts = [draw.choices(range(vocabulary), k=arguments.prompt) for _ in range(arguments.requests)]
    eos = vocabulary - 1
    sampled = {
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "suppress_tokens": [1, 2],
        "begin_suppress_tokens": [3],
        "min_new_tokens": arguments.new,
        "eos_token_id": eos,
    }
    tokenizer = byte_pairs(vocabulary)
    schema = {"json_schema": SCHEMA, "tokenizer": tokenizer, "eos_token_id": eos, "do_sample": False}
    engine = Engine(model, config, program=program)
    options: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "sampled": sampled, "json schema": schema}
    return {name: served(engine, prompts, arguments.new, each) for name, each in options.items()}


def lookup(
    model: PreTrainedModel,
    config: EngineConfig,
    program: Program,
    shape: DecoderShape,
    arguments: argparse.Namespace,
    task: str,
) -> Ways:
    draw = random.Random(0)
    prompts = [task_prompt(task, draw, shape.vocabulary, arguments.new) for _ in range(8)]
    engine = Engine(model, config, program=program)
    plain: dict[str, Any] = {"do_sample": False}
    return {
        "plain": served(engine, prompts, arguments.new, plain),
        "lookup": served(engine, prompts, arguments.new, {**plain, "prompt_lookup_num_tokens": DRAFT}),
    }


def invariance(engines: Mapping[str, Engine], shape: DecoderShape, arguments: argparse.Namespace, task: str) -> Ways:
    draw = random.Random(0)
    decoding = task == "invariant decoding"
    length, new = (arguments.prompt, arguments.new) if decoding else (min(LONG, shape.positions - 1), 1)
    prompts = [draw.choices(range(shape.vocabulary), k=length) for _ in range(arguments.requests)]
    plain: dict[str, Any] = {"do_sample": False}
    return {name: served(engine, prompts, new, plain) for name, engine in engines.items()}


def served(engine: Engine, prompts: Sequence[list[int]], new: int, options: dict[str, Any]) -> Callable[[], Answered]:
    def run() -> Answered:
        before = engine.stats().steps
        handles = [
            engine.submit(prompt, max_new_tokens=new, seed=number, **options) for number, prompt in enumerate(prompts)
        ]
        while engine.step():
            pass
        results = [handle.result() for handle in handles]
        assert all(result.error is None and len(result.tokens) == new for result in results), results[0]
        return Answered(tokens=[list(result.tokens) for result in results], steps=engine.stats().steps - before)

    return run


def task_prompt(task: str, draw: random.Random, vocabulary: int, new: int) -> list[int]:
    half = cycles(vocabulary)
    if task == "copying":
        first = draw.randrange(half // CYCLE) * CYCLE
        return [*range(first, first + CYCLE), first]
    start = draw.randrange(half, vocabulary - 2 * new - 2)
    if task == "nothing repeats":
        return list(range(start - CYCLE, start + 1)) if start - CYCLE >= half else [start]
    wrong = [(token, draw.randrange(half)) for token in range(start, start + new)]
    draw.shuffle(wrong)
    return [*(token for pair in wrong for token in pair), start]


def byte_pairs(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of the 256 bytes and as many pairs of the printable ones as there is room for, with an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = [chr(code) for code in range(33, 127)]
    pairs = [(a, b) for a in [*plain, *alphabet] for b in [*plain, *alphabet]]
    pairs = list(dict.fromkeys(pairs))[: vocabulary - len(alphabet) - 1]
    names = [*alphabet, *(a + b for a, b in pairs), "<end>"]
    backend = Tokenizer(models.BPE(vocab={name: place for place, name in enumerate(names)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    return parsed(parser)


if __name__ == "__main__":
    main()
