"""The checkpoint that all peers serve: a Llama with random weights, on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel

from selective_compile.bench.serving import random_llama
from selective_compile.bench.settings import DtypeName, LlamaShape
from selective_compile.checkpoints import DTYPES, device_named


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder, and as what it is to be loaded.

    Attributes:
        shape: of the model that lies there, in float32.
    """

    folder: Path
    shape: LlamaShape
    dtype: DtypeName
    device: str = "cpu"

    def write(self, seed: int) -> None:
        random_llama(self.shape, seed).save_pretrained(self.folder)

    def load(self) -> PreTrainedModel:
        """A model object of its own, with SDPA."""
        model = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=DTYPES[self.dtype], attn_implementation="sdpa", local_files_only=True
        )
        return model.to(device_named(self.device)).eval()

    @property
    def slot_bytes(self) -> int:
        """Of the keys and values of a token."""
        shape = self.shape
        return 2 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads) * DTYPES[self.dtype].itemsize
