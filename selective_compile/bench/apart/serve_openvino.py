"""OpenVINO GenAI's continuous batching, with keys and values in the precision of the weights."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selective_compile.bench.apart.conversation import Wanted

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
BLOCK = 32  # slots, on a CPU


class OpenVino:
    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._genai = importlib.import_module("openvino_genai")
        self._openvino = importlib.import_module("openvino")
        self._numpy = importlib.import_module("numpy")
        self._running: dict[int, Any] = {}

    def load(self) -> None:
        wanted, precision = self._wanted, PRECISIONS[self._wanted.dtype]
        scheduling = self._genai.SchedulerConfig()
        scheduling.num_kv_blocks = wanted.slots // BLOCK
        scheduling.max_num_batched_tokens = wanted.token_budget
        scheduling.dynamic_split_fuse = True
        scheduling.enable_prefix_caching = wanted.reuse
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": wanted.threads,
        }
        self._pipeline = self._genai.ContinuousBatchingPipeline(wanted.folder, scheduling, "CPU", properties)

    def about(self) -> dict[str, Any]:
        return {"attention": "PagedAttention of OpenVINO", "version": self._genai.__version__}

    def add(self, number: int, prompt_ids: list[int], new_tokens: int) -> None:
        wanted = self._genai.GenerationConfig()
        wanted.do_sample = False
        wanted.max_new_tokens = new_tokens
        wanted.set_eos_token_id(0)  # it must have one, to be ignored
        wanted.ignore_eos = True
        ids = self._openvino.Tensor(self._numpy.array([prompt_ids], dtype=self._numpy.int64))
        self._running[number] = self._pipeline.add_request(number, ids, wanted)

    def step(self) -> Iterator[tuple[int, list[int], bool]]:
        self._pipeline.step()
        still_runs = self._genai.GenerationStatus.RUNNING
        for number, handle in list(self._running.items()):
            ended = handle.get_status() != still_runs
            new: list[int] = []
            while handle.can_read():
                (output,) = handle.read().values()
                new += output.generated_ids
            if ended:
                del self._running[number]
            if new or ended:
                yield number, new, ended


server = OpenVino
