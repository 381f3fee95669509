"""vLLM on a CPU, compiled, with keys and values in the precision of the weights."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selective_compile.bench.apart.conversation import Wanted


class Vllm:
    def __init__(self, wanted: Wanted) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self._wanted = wanted
        self._vllm = importlib.import_module("vllm")
        self._new_only = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA

    def load(self) -> None:
        wanted = self._wanted
        llm = self._vllm.LLM(
            wanted.folder,
            dtype=wanted.dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=wanted.reuse,
            max_num_batched_tokens=wanted.token_budget,
            max_model_len=wanted.longest,
            kv_cache_memory_bytes=wanted.slots * wanted.slot_bytes,
        )
        self._engine = llm.llm_engine

    def about(self) -> dict[str, Any]:
        platform = importlib.import_module("vllm.platforms").current_platform
        kernels = "compiled, zentorch" if platform.is_zen_cpu() else "compiled"
        return {"attention": f"paged attention of vLLM, {kernels}", "version": self._vllm.__version__}

    def add(self, number: int, prompt_ids: list[int], new_tokens: int) -> None:
        wanted = self._vllm.SamplingParams(
            temperature=0.0,
            max_tokens=new_tokens,
            min_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._new_only,
        )
        self._engine.add_request(str(number), {"prompt_token_ids": prompt_ids}, wanted)

    def step(self) -> Iterator[tuple[int, list[int], bool]]:
        for output in self._engine.step():
            yield int(output.request_id), list(output.outputs[0].token_ids), output.finished


server = Vllm
