"""Bytes as tokens: id 0-255 is that byte, and three special tokens follow."""

from __future__ import annotations

from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PAD: Final = 256
BOS: Final = 257
EOS: Final = 258
VOCAB_SIZE: Final = 259


def encode(text: str) -> list[int]:
    """What the tokenizer gives for `text`, `<bos>` included, without the tokenizer."""
    return [BOS, *text.encode()]


def _byte_names() -> list[str]:
    """The character by which the `ByteLevel` pre-tokenizer names each byte.

    A printable Latin-1 byte is named by its own character, the others by those from U+0100 on, in order.
    """
    spare = iter(range(256, 512))
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def build() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer without merges, which puts `<bos>` in front as Llama's does."""
    vocabulary = {name: byte for byte, name in enumerate(_byte_names())}
    specials = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | specials, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        model_max_length=1024,
    )
