"""OpenVINO GenAI's continuous batching, with keys and values in the precision of the weights."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class OpenVino:
    def __init__(
        self, *, folder: str, dtype: str, threads: int, slots: int, slot_bytes: int, token_budget: int
    ) -> None:
        self._genai = importlib.import_module("openvino_genai")
        self._openvino = importlib.import_module("openvino")
        self._numpy = importlib.import_module("numpy")
        precision = PRECISIONS[dtype]
        scheduling = self._genai.SchedulerConfig()
        scheduling.cache_size = -(-slots * slot_bytes // 2**30) + 1  # in GiB; none is missing
        scheduling.max_num_batched_tokens = token_budget
        scheduling.dynamic_split_fuse = True
        scheduling.enable_prefix_caching = False
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": threads,
        }
        self._pipeline = self._genai.ContinuousBatchingPipeline(folder, scheduling, "CPU", properties)
        self._running: dict[int, Any] = {}
        self._about = {
            "attention": "PagedAttention of OpenVINO",
            "weights": dtype,
            "keys_and_values": dtype,
            "token_budget": token_budget,
            "version": self._genai.__version__,
        }

    def about(self) -> dict[str, Any]:
        return self._about

    def add(self, number: int, prompt_ids: list[int], new_tokens: int) -> None:
        wanted = self._genai.GenerationConfig()
        wanted.do_sample = False
        wanted.max_new_tokens = new_tokens
        wanted.set_eos_token_id(0)  # it must have one, to be ignored
        wanted.ignore_eos = True
        ids = self._openvino.Tensor(self._numpy.array([prompt_ids], dtype=self._numpy.int64))
        self._running[number] = self._pipeline.add_request(number, ids, wanted)

    def step(self) -> Iterator[tuple[int, list[int]]]:
        self._pipeline.step()
        running = self._genai.GenerationStatus.RUNNING
        for number in [number for number, handle in self._running.items() if handle.get_status() != running]:
            (output,) = self._running.pop(number).read_all()
            yield number, list(output.generated_ids)


server = OpenVino
