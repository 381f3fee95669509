"""The checkpoint that all peers serve: a model with random weights, on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from selective_compile.bench.serving import random_decoder
from selective_compile.bench.settings import DtypeName
from selective_compile.bench.sizes import DecoderShape
from selective_compile.checkpoints import DTYPES, device_named


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder, and as what it is to be loaded.

    Attributes:
        shape: of the model that lies there, in `dtype`: peers that read a file where it lies hold no other copy.
    """

    folder: Path
    shape: DecoderShape
    dtype: DtypeName
    device: str = "cpu"

    def write(self, seed: int) -> None:
        """Weights that are those of float32, rounded."""
        random_decoder(self.shape, seed).to(DTYPES[self.dtype]).save_pretrained(self.folder)

    def load(self) -> PreTrainedModel:
        """A model object of its own, with SDPA."""
        model = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=DTYPES[self.dtype], attn_implementation="sdpa", local_files_only=True
        )
        return model.to(device_named(self.device)).eval()

    def skeleton(self) -> PreTrainedModel:
        """The model without its weights, which tells their sizes."""
        config = AutoConfig.from_pretrained(self.folder, local_files_only=True)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=DTYPES[self.dtype])

    @property
    def slot_bytes(self) -> int:
        """Of the keys and values of a token."""
        return self.shape.slot_numbers * DTYPES[self.dtype].itemsize

    @property
    def weight_bytes(self) -> int:
        """Of all weights, one that is used twice counted once."""
        return sum(parameter.nbytes for parameter in self.skeleton().parameters())
