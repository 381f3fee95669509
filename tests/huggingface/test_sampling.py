"""`generate` with sampling: seeds, and the distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import selective_compile as sc
from tests.huggingface.models import CONFIG, random_ids
from tests.oracle import reference_logits


def test_sampling_repeats_with_torch_manual_seed(model: Any) -> None:
    ids = random_ids(3, 6)
    options = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 12, "engine_config": CONFIG}
    torch.manual_seed(5)
    first, second = sc.generate(model, ids, **options), sc.generate(model, ids, **options)
    torch.manual_seed(5)
    assert torch.equal(sc.generate(model, ids, **options), first)
    assert not torch.equal(first, second)


def test_greedy_decoding_does_not_draw(model: Any) -> None:
    state = torch.get_rng_state()
    sc.generate(model, random_ids(3, 6), max_new_tokens=3, engine_config=CONFIG)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_seed_decides_whatever_the_batch(model: Any) -> None:
    ids = random_ids(1, 6).repeat(3, 1)
    options = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 12, "engine_config": CONFIG}
    together = sc.generate(model, ids, seed=40, **options)
    assert len({tuple(row) for row in together.tolist()}) == 3
    assert torch.equal(sc.generate(model, ids[:1], seed=42, **options)[0], together[2])
    assert torch.equal(sc.generate(model, ids, seed=[42, 41, 40], **options), together.flip(0))
    assert torch.equal(sc.generate(model, ids, seed=np.int64(40), **options), together)


def test_sampling_follows_the_distribution_of_generate(model: Any) -> None:
    """4,000 draws of one token among the four likeliest, against their probabilities."""
    ids, draws = random_ids(1, 6), 4000
    result = sc.generate(
        model,
        ids.repeat(draws, 1),
        do_sample=True,
        top_k=4,
        temperature=2.0,
        max_new_tokens=1,
        seed=0,
        engine_config=CONFIG,
    )
    logits = reference_logits(model, ids[0].tolist(), [0])[0] / 2.0
    likeliest = logits.topk(4)
    expected = likeliest.values.softmax(0) * draws
    seen = torch.stack([(result[:, -1] == token).sum() for token in likeliest.indices])
    assert int(seen.sum()) == draws
    # 16.27 is the 0.1 % point of chi-square with 3 degrees of freedom.
    assert float(((seen - expected) ** 2 / expected).sum()) < 16.27
