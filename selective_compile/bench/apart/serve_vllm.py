"""vLLM on a CPU, compiled, with keys and values in the precision of the weights."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any


class Vllm:
    def __init__(
        self, *, folder: str, dtype: str, threads: int, slots: int, slot_bytes: int, token_budget: int
    ) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(-(-slots * slot_bytes // 2**30) + 1)  # in GiB; none is missing
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["OMP_NUM_THREADS"] = str(threads)
        self._vllm = importlib.import_module("vllm")
        llm = self._vllm.LLM(
            folder,
            dtype=dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_batched_tokens=token_budget,
        )
        self._engine = llm.llm_engine
        self._about = {
            "attention": "paged attention of vLLM, compiled",
            "weights": dtype,
            "keys_and_values": dtype,
            "token_budget": token_budget,
            "version": self._vllm.__version__,
        }

    def about(self) -> dict[str, Any]:
        return self._about

    def add(self, number: int, prompt_ids: list[int], new_tokens: int) -> None:
        wanted = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(str(number), {"prompt_token_ids": prompt_ids}, wanted)

    def step(self) -> Iterator[tuple[int, list[int]]]:
        for output in self._engine.step():
            if output.finished:
                yield int(output.request_id), list(output.outputs[0].token_ids)


server = Vllm
