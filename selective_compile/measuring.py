"""`selective-compile logit-error`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from selective_compile.choices import MOST_THREADS, DtypeName, KvDtype, Weights
from selective_compile.interrupts import ending_at_once
from selective_compile.terminal import begin

if TYPE_CHECKING:
    from selective_compile.checkpoints import Checkpoint


def logit_error_command(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="What the model is to be used for tells most.", show_default="those of the demo"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="A folder or a Hugging Face id.", show_default="the model that ships"),
    ] = None,
    kv_dtype: Annotated[KvDtype, typer.Option(help="As in EngineConfig.")] = "int8",
    weights: Annotated[Weights, typer.Option(help="As in EngineConfig.")] = "model",
    max_attention_window: Annotated[
        int | None, typer.Option(min=1, help="As in EngineConfig.", show_default="as far as the model sees")
    ] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Of the weights; auto: as they are stored.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, max=MOST_THREADS, help="For torch.", show_default="torch's choice")
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that lies beside the weights.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")] = False,
) -> None:
    """Measure how far options that change results move the logits, on prompts of yours.

    \b
    selective-compile logit-error
    selective-compile logit-error --kv-dtype auto --weights int8
    selective-compile logit-error --model ./checkpoint --dtype bfloat16 "$(cat a-long-text.txt)"
    """
    with ending_at_once():
        from selective_compile import checkpoints
        from selective_compile.options import EngineConfig
        from selective_compile.runtime.logit_error import logit_error

    stages, out = begin(threads)
    with stages("loading the model"):
        checkpoint = checkpoints.load(model, dtype=dtype, trust_remote_code=trust)
    config = EngineConfig(
        kv_dtype=kv_dtype,
        weights=weights,
        max_attention_window=max_attention_window,
        threads=threads,
        compile=False,
    )
    with stages("computing the prompts, both ways"):
        error = logit_error(checkpoint.model, token_ids(checkpoint, prompts), config)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(error), indent=1))
    else:
        out.print(Text(str(error)), soft_wrap=True)


def token_ids(checkpoint: Checkpoint, prompts: Sequence[str] | None) -> list[list[int]]:
    """Of the prompts; without any, of the demo's and the answers that follow, which only the model that ships knows.

    Raises:
        ValueError: there are none, and it is another model.
    """
    from selective_compile.tiny_model.prompts import demo_prompts

    if not prompts and not checkpoint.shipped:
        raise ValueError("prompts must be given for another model than the one that ships, got none")
    texts = prompts or [prompt.text + (prompt.answer or "") for prompt in demo_prompts()]
    return [list(checkpoint.tokenizer(text).input_ids) for text in texts]
