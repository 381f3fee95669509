"""One batch, a different wish from each request: sampling, penalties, a processor of one's own, a JSON schema."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor

import selective_compile as sc
from selective_compile import tiny_model

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}, "odd": {"type": "boolean"}},
    "required": ["sum", "odd"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


class NoDigits(LogitsProcessor):
    """As for `model.generate`; called for its own request alone."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.arange(ord("0"), ord("9") + 1), -torch.inf)


def main(compile: bool = True) -> dict[str, str]:
    """Returns the answers by request id."""
    model, tokenizer = tiny_model.load()
    engine = sc.Engine(model, sc.EngineConfig(compile=compile))

    def submit(name: str, prompt: str, config: GenerationConfig | None = None, **options: object) -> sc.Request:
        ids = tokenizer(prompt).input_ids
        return engine.submit(ids, config, request_id=name, tokenizer=tokenizer, max_new_tokens=40, **options)

    submitted = [
        submit("plain", "12+7="),
        submit("sampled", "the key is", GenerationConfig(do_sample=True, temperature=1.5, min_p=0.1), seed=3),
        submit("no repeats", "copy (red red red):", no_repeat_ngram_size=3),
        submit("stop string", "letters c to j:", stop_strings=["f g"]),
        submit("own processor", "12+7=", logits_processor=[NoDigits()]),
        submit("schema", "12+7=", json_schema=SCHEMA),
        submit("likeliest", "3+4=", logprobs=True, top_logprobs=3),
    ]
    results = {str(request.request_id): request.result() for request in submitted}
    answers = {name: tokenizer.decode(one.tokens, skip_special_tokens=True) for name, one in results.items()}
    for name, text in answers.items():
        print(f"{name:>13}: {text!r} ({results[name].finish_reason})")
    top = results["likeliest"].top_logprobs
    assert top is not None
    for token, logprob in zip(*top[0], strict=True):
        print(f"{tokenizer.decode(token)!r}: {logprob:.2f}")
    return answers


if __name__ == "__main__":
    main()
