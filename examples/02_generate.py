"""Drop-in generation: `generate` with the arguments of `model.generate`, and prompts of any lengths in a list."""

from __future__ import annotations

from transformers import GenerationConfig

import selective_compile as sc
from selective_compile import tiny_model

PROMPTS = ["12+7=", "letters c to j:", "after monday comes", "copy (red blue green):"]


def main(compile: bool = True) -> list[str]:
    """Returns the prompts with their answers."""
    model, tokenizer = tiny_model.load()
    config = sc.EngineConfig(compile=compile)

    # A list of prompts needs no padding; each may bring a GenerationConfig of its own.
    prompts = tokenizer(PROMPTS).input_ids
    wishes = [GenerationConfig(max_new_tokens=length) for length in (4, 24, 12, 24)]
    out = sc.generate(model, prompts, generation_config=wishes, engine_config=config)
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in out]
    print("\n".join(texts))

    # A padded tensor gives what model.generate gives. Within `wrapped`, model.generate itself is batched.
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    expected = model.generate(**batch, max_new_tokens=24, do_sample=False)
    with sc.wrapped(model, config):
        same = model.generate(**batch, max_new_tokens=24, do_sample=False)
    print("equal to model.generate:", same.equal(expected))
    assert same.equal(expected)
    return texts


if __name__ == "__main__":
    main()
