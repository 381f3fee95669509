"""The models that can be measured, all with random weights, and what is asked of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

ModelName = Literal["125m", "135m", "0.5b", "1b", "1b-a400m"]
TraceName = Literal["skewed", "shared_prefix", "alone", "long_context"]


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Sizes of a Llama, or of a GraniteMoe, which has experts; the default is a Llama of 125 million parameters.

    Attributes:
        mlp: of each expert, where there are any.
        experts, chosen: how many experts a layer has, none in a Llama, and how many of them a token goes to.
        head_size: of each head; None: hidden over heads.
        tied: the LM head is the input embedding.
        positions: tokens that a request can have.
    """

    hidden: int = 768
    layers: int = 12
    heads: int = 12
    kv_heads: int = 4
    head_size: int | None = None
    mlp: int = 2048
    experts: int = 0
    chosen: int = 0
    vocabulary: int = 32_000
    tied: bool = False
    positions: int = 2048

    @property
    def size_of_head(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def slot_numbers(self) -> int:
        """Of the keys and values of a token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.size_of_head


@dataclass(frozen=True, kw_only=True)
class Load:
    """How many requests, and how long.

    Attributes:
        prefix_tokens: that all prompts begin with, the same for all.
        prompt_tokens, output_tokens: of each request, the prefix not counted; drawn log-uniformly, ends included.
    """

    requests: int
    prefix_tokens: int = 0
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


# The sizes of Llama models, and of SmolLM2-135M, Qwen2.5-0.5B (but for its biases), Llama-3.2-1B, Granite-3.1-1B-A400M.
SHAPES: Final[dict[ModelName, DecoderShape]] = {
    "125m": DecoderShape(),
    "135m": DecoderShape(
        hidden=576, layers=30, heads=9, kv_heads=3, head_size=64, mlp=1536, vocabulary=49_152, tied=True
    ),
    "0.5b": DecoderShape(
        hidden=896, layers=24, heads=14, kv_heads=2, head_size=64, mlp=4864, vocabulary=151_936, tied=True
    ),
    "1b": DecoderShape(
        hidden=2048, layers=16, heads=32, kv_heads=8, head_size=64, mlp=8192, vocabulary=128_256, tied=True
    ),
    "1b-a400m": DecoderShape(
        hidden=1024, layers=24, heads=16, kv_heads=8, mlp=512, experts=32, chosen=8, vocabulary=49_155, tied=True
    ),
}
LOADS: Final[dict[TraceName, Load]] = {
    "skewed": Load(requests=32, prompt_tokens=(8, 512), output_tokens=(8, 256)),
    "shared_prefix": Load(requests=32, prefix_tokens=1000, prompt_tokens=(8, 64), output_tokens=(8, 64)),
    "alone": Load(requests=1, prompt_tokens=(16, 16), output_tokens=(128, 128)),
    "long_context": Load(requests=4, prompt_tokens=(8192, 8192), output_tokens=(64, 64)),
}
# The same, so small that seconds show that they run.
QUICK_LOADS: Final[dict[TraceName, Load]] = {
    "skewed": Load(requests=6, prompt_tokens=(4, 24), output_tokens=(2, 12)),
    "shared_prefix": Load(requests=4, prefix_tokens=80, prompt_tokens=(4, 8), output_tokens=(2, 8)),
    "alone": Load(requests=1, prompt_tokens=(4, 4), output_tokens=(8, 8)),
    "long_context": Load(requests=2, prompt_tokens=(160, 160), output_tokens=(4, 4)),
}
