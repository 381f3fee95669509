"""The model that ships: a byte-level Llama of a million parameters whose answers can be checked by eye."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def path() -> Path:
    """The Hugging Face folder with the weights, the tokenizer and the model card."""
    return Path(__file__).parent / "weights"


def load(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in eval mode on the CPU, and its tokenizer; needs no network."""
    model = AutoModelForCausalLM.from_pretrained(path(), dtype=dtype, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(path(), local_files_only=True)
