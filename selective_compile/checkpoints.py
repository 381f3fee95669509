"""A model and its tokenizer from a local folder, a Hugging Face id, or the package itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from selective_compile import tiny_model
from selective_compile.choices import DtypeName

# What transformers raises of files that are cut short, or of another model.
UNREADABLE = (OSError, ValueError, ImportError, KeyError, RuntimeError, TypeError, AttributeError, SafetensorError)
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a command works on; `shipped` is the model of the package, whose answers are known."""

    name: str
    shipped: bool
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def greedy(self, max_new_tokens: int) -> GenerationConfig:
        """Greedy decoding of one sequence, without a penalty; what else the checkpoint's own configuration asks
        for, as stop strings, stays."""
        own = self.model.generation_config
        return GenerationConfig(
            do_sample=False,
            temperature=1.0,
            top_k=50,
            top_p=1.0,
            repetition_penalty=1.0,
            num_beams=1,
            num_return_sequences=1,
            max_new_tokens=max_new_tokens,
            eos_token_id=own.eos_token_id,
            pad_token_id=self.padding_id,
        )

    @property
    def padding_id(self) -> int:
        """A token id to pad with; any will do, since the attention mask hides it."""
        known = (self.tokenizer.pad_token_id, self.model.generation_config.eos_token_id, 0)
        first = next(token for token in known if token is not None)
        return first if isinstance(first, int) else first[0]

    def decoded(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def load(
    name: str | None = None, *, dtype: DtypeName = "auto", device: str = "cpu", trust_remote_code: bool = False
) -> Checkpoint:
    """The model in eval mode on `device`, and its tokenizer.

    Args:
        name: a folder or a Hugging Face id; None: the model that ships.
        dtype: "auto" takes the dtype that the checkpoint is stored in.
        device: as torch names it, such as "cpu" or "cuda"; "auto": a GPU if there is one.
        trust_remote_code: whether Python code that lies beside the weights may run.

    Raises:
        ValueError: there is no such model, dtype or device, it has no tokenizer, or it comes with code of its own that
            is not trusted.
    """
    source = name if name is not None else str(tiny_model.path())
    model = load_model(name, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"model must come with a tokenizer, got {source!r}: {first_line(error)}") from error
    if tokenizer.vocab_size == 0:
        raise ValueError(f"model must come with a tokenizer, got {source!r} without its files")
    return Checkpoint(name=source, shipped=name is None, model=model, tokenizer=tokenizer)


def load_model(
    name: str | None = None, *, dtype: DtypeName = "auto", device: str = "cpu", trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model alone, for what needs no tokenizer; as `load`."""
    if dtype not in get_args(DtypeName):
        raise ValueError(f"dtype must be one of {', '.join(get_args(DtypeName))}, got {dtype!r}")
    target = device_named(device)
    source = name if name is not None else str(tiny_model.path())
    if source.startswith(("/", "./", "../", "~")) or Path(source).exists():
        if not (Path(source) / "config.json").exists():
            raise ValueError(f"model must be a folder with a config.json, got {source!r}")
    refuse_code_without_trust(source, trust_remote_code)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            source, dtype=DTYPES.get(dtype, dtype), trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except UNREADABLE as error:
        raise ValueError(
            f"model must be a folder or a Hugging Face id of a causal language model, got {source!r}: "
            f"{first_line(error)}"
        ) from error
    refuse_missing_weights(source, sorted(found["missing_keys"]))
    return model.to(target).eval()


def refuse_missing_weights(source: str, missing: list[str]) -> None:
    """transformers draws them at random, and warns."""
    if missing:
        raise ValueError(
            f"model must come with all of its weights, got {source!r} without {len(missing)} of them, as {missing[0]}"
        )


def refuse_code_without_trust(source: str, trusted: bool) -> None:
    """For folders, where transformers would ask at the terminal; of an id on the hub it tells by itself."""
    config = Path(source) / "config.json"
    if trusted or not config.is_file():
        return
    try:
        given = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"config.json must be JSON in UTF-8, got {str(config)!r}: {first_line(error)}") from error
    if not isinstance(given, dict):
        raise ValueError(f"config.json must be an object, got a {type(given).__name__} in {str(config)!r}")
    own = given.get("auto_map") or {}
    if "AutoModelForCausalLM" in own or "AutoConfig" in own:
        raise ValueError(
            f"trust_remote_code must be true (--trust-remote-code) for a model that comes with code of its own, got "
            f"{source!r} with {', '.join(map(str, own.values()))}; read that code first"
        )


def device_named(name: str) -> torch.device:
    """The torch device; "auto" is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be one that torch knows, such as cpu or cuda, got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be cpu where torch finds no GPU, got {name!r}")
    try:
        torch.empty(0, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch was built without it, or there is none
        raise ValueError(f"device must be one that is there, got {name!r}: {first_line(error)}") from error
    return device


def first_line(error: BaseException) -> str:
    """The gist of an error of transformers, which come with paragraphs of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
