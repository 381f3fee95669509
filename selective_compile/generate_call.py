"""What one call of `generate` asks for, read once and checked before anything is generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn
from transformers.generation import BaseStreamer

from selective_compile.batch_criteria import BatchCriteria
from selective_compile.generate_arguments import (
    FORWARD_ARGUMENTS,
    check_configuration,
    check_fields_with,
    check_forward_arguments,
    refuse_unsupported,
)
from selective_compile.generate_beams import check_beams
from selective_compile.generate_fields import GENERATION_FIELDS, Fields, fields_of
from selective_compile.generate_objects import OBJECTS, CallObjects
from selective_compile.generate_prompts import Prompts, expanded, prompts_of, prompts_of_embeddings, with_types
from selective_compile.generate_results import refuse_ends_without_padding
from selective_compile.generate_states import check_states
from selective_compile.model_facts import device_of
from selective_compile.options import EngineConfig
from selective_compile.runtime.grammar import GRAMMARS
from selective_compile.self_served import of_batches, why_of_objects

OF_PROMPTS = ("inputs", "input_ids", "attention_mask", "inputs_embeds", "token_type_ids")
# What is kept of each token, of which a row may have more than criteria end it at.
KEPT = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
READ: Final = (
    GENERATION_FIELDS | FORWARD_ARGUMENTS | {*OF_PROMPTS, *OBJECTS, *GRAMMARS, "generation_config", "streamer"}
)
# All that a call may name, of which a name that is close to one is told.
NAMES: Final = READ | {"synced_gpus", "custom_generate", "engine_config", "seed"}


@dataclass(frozen=True, kw_only=True)
class GenerateCall:
    """As many prompts as rows are generated, and for each its fields.

    Attributes:
        objects: what else comes with the call, for all rows.
        streamer: gets what is generated; None: nobody does.
    """

    prompts: Prompts
    fields: Sequence[Fields]
    objects: CallObjects
    streamer: BaseStreamer | None

    @classmethod
    def of(cls, model: nn.Module, given: Mapping[str, Any]) -> GenerateCall:
        """Read all arguments of `model.generate` that are given by name.

        Raises:
            ValueError: one of them is wrong, or is not supported.
        """
        refuse_unsupported({name: value for name, value in given.items() if name not in READ}, model, NAMES)
        arguments = {name: value for name, value in given.items() if name in GENERATION_FIELDS}
        if given.get("generation_config") is None:
            check_configuration(model)
        inputs, defaults = _inputs_of(given), getattr(model, "generation_config", None)
        fields = fields_of(arguments, given.get("generation_config"), defaults, inputs)
        prompts = _prompts_of(model, given, inputs, fields)
        check_forward_arguments(prompts, given)
        prompts, fields = expanded(prompts, fields * len(prompts.rows) if len(fields) == 1 else fields)
        return cls(prompts=prompts, fields=fields, objects=CallObjects.of(given), streamer=given.get("streamer"))

    @property
    def kind(self) -> tuple[Any, ...]:
        """What decides beside the model whether it is refused."""
        return self.prompts.embeds is not None, self.prompts.types is not None, id(self.objects.assistant_model)

    @property
    def sampled(self) -> bool:
        return any(each["do_sample"] for each in self.fields)

    def why_the_models_own(self) -> str | None:
        """Why its objects make it one that the model serves itself; or None."""
        objects = {"logits_processor": self.objects.logits_processor}
        if self._padding is None:
            objects["stopping_criteria"] = self.objects.stopping_criteria
        return why_of_objects(objects, len(self.fields))

    def criteria_apart(self) -> tuple[GenerateCall, BatchCriteria | None]:
        """The call without those of its criteria that are to be asked about all rows, and these, if there are any."""
        found, columns = of_batches(self.objects.stopping_criteria), self.prompts.columns
        if not found or columns is None or self._padding is None:
            return self, None
        others = [each for each in self.objects.stopping_criteria if not any(each is one for one in found)]
        call = replace(self, objects=replace(self.objects, stopping_criteria=others))
        return call, BatchCriteria(found, columns, self._padding)

    @property
    def _padding(self) -> int | None:
        """What rows of a tensor that have ended are filled up with where criteria can be asked about all rows."""
        columns, given = self.prompts.columns, self.objects.stopping_criteria
        more = self.prompts.embeds is not None or self.streamer is not None or any(map(keeps_more, self.fields))
        if more or columns is None or not 1 < len(columns) == len(self.fields):
            return None
        named = isinstance(given, (list, tuple)) and any(hasattr(each, "eos_token_id") for each in given)
        # As there; without an end, rows that have ended go on among the others.
        found = {each.pad_token_id if named or each.eos_token_ids else None for each in self.fields}
        return found.pop() if len(found) == 1 else None

    def check(self, model: nn.Module, config: EngineConfig) -> None:
        """Refuse what does not go together.

        Raises:
            ValueError: naming it.
        """
        listed, rows = self.prompts.columns is None, len(self.fields)
        if self.streamer is not None and listed and rows > 1:
            raise ValueError(f"streamer must be None for a list of more than one prompt, got one for {rows}")
        check_beams(self.fields, streamer=self.streamer)
        check_states(model, self.prompts, self.fields, config)
        criteria = self.objects.stopping_criteria or ()
        refuse_ends_without_padding(self.fields, criteria=criteria, rows=0 if listed else rows)


def keeps_more(fields: Fields) -> bool:
    """Than one sequence of tokens."""
    return fields.num_beams > 1 or any(fields[name] for name in KEPT)


def _inputs_of(given: Mapping[str, Any]) -> Any:
    inputs, input_ids = given.get("inputs"), given.get("input_ids")
    if inputs is not None and input_ids is not None:
        raise ValueError("input_ids must be None where inputs is given, got both")
    return input_ids if inputs is None else inputs


def _prompts_of(model: nn.Module, given: Mapping[str, Any], inputs: Any, fields: Sequence[Fields]) -> Prompts:
    mask, embeds, types = (given.get(name) for name in ("attention_mask", "inputs_embeds", "token_type_ids"))
    for name in ("inputs_embeds", "token_type_ids"):
        if given.get(name) is not None:
            check_fields_with(name, fields)
    if embeds is None:
        prompts = prompts_of(inputs, mask, fields, device_of(model))
    else:
        prompts = prompts_of_embeddings(embeds, inputs, mask, fields[0])
    return prompts if types is None else with_types(prompts, types)
