"""The configuration of a decoder that no library has, with names of its own."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class OwnConfig(PretrainedConfig):
    model_type = "own_decoder"
    attribute_map = {"num_hidden_layers": "depth", "hidden_size": "width", "num_attention_heads": "heads"}

    def __init__(self, form: str = "parallel", symbols: int = 101, width: int = 32, depth: int = 2, **kwargs: Any):
        self.form, self.vocab_size, self.width, self.depth = form, symbols, width, depth
        self.symbols, self.heads, self.reach = symbols, 4, 256
        super().__init__(**kwargs)
