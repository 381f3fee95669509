"""Trials on disk: what a model has passed once it passes again, with the same weights, code and settings.

A trial calls the model some twenty times, which takes the longer the larger it is; to add up its weights takes as long
as to read them once.  Only that a model has passed is kept, in the name of an empty file: of one that was refused all
is tried anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

from selective_compile.captured import Captured
from selective_compile.kept_captures import modules_of, parts_of, told_file
from selective_compile.kept_files import attempt, data_of, own_folder, was_of_use, write
from selective_compile.passes import Refusal
from selective_compile.told_models import ToldModel

ENDING = ".passed"


def passed_once(
    model: nn.Module, captured: Captured, trial: Callable[[], Refusal | None], *asked: Any
) -> Refusal | None:
    """As ``trial``, which is not run where ``model`` has passed it in an earlier process or in this one.

    ``asked``: what else it depends on, as numbers.
    """
    file = None
    with attempt("look for a kept trial"):
        file = own_folder() / f"{digest(model, captured, *asked)}{ENDING}"
        if file.exists() and not data_of(file):
            was_of_use(file)
            return None
    found = trial()
    if file is not None and found is None:
        with attempt("keep a trial"):
            write(file, b"")
    return found


def digest(model: nn.Module, captured: Captured, *asked: Any) -> str:
    """Of all that a call of the model, with a cache or without, may depend on.

    Raises:
        ValueError: as `parts_of` and `ToldModel`, or some code is of no module with a file.
    """
    told = ToldModel(model)
    for words in (parts_of(model), transformers.__version__, *asked):
        told.tell(words)
    for module in sorted(modules_of(captured.read.code)):
        told.tell(told_file(module))
    return told.digest
