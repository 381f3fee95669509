"""Compile a model: a padded batch goes in, logits of the same shape come out, and padding costs nothing."""

from __future__ import annotations

import torch

from selective_compile import tiny_model

PROMPTS = ["12+7=", "count 3 to 9:", "the key is in the box. the cup is in the car. where is the key?"]


def main(inductor: bool = True) -> float:
    """Returns the largest difference between the compiled model's logits and the model's own."""
    model, tokenizer = tiny_model.load()
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    mask = batch.attention_mask

    # In a program of its own this needs no import of selective_compile: the backend is found by its name.
    fast = torch.compile(model, backend="selective", options={"inductor": inductor})
    with torch.no_grad():
        expected = model(batch.input_ids, attention_mask=mask).logits  # [B, S, V]
        logits = fast(batch.input_ids, attention_mask=mask).logits  # [B, S, V]

    real, padded = int(mask.sum()), mask.numel()
    print(f"{padded} positions in the padded batch, {real} of them tokens: only those are computed")
    for prompt, row in zip(PROMPTS, logits, strict=True):
        print(f"{prompt[-30:]:>30} -> {tokenizer.decode(row[-1].argmax())!r}")
    difference = (logits - expected)[mask.bool()].abs().max().item()
    print(f"largest difference of a token's logits: {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
