"""Stands for SGLang: what the self-check calls of it, over the engine in plain Python."""

import os
import sys
from types import SimpleNamespace
from typing import Any

from support.faulty_engine import FaultyEngine

__version__ = "0.5.23"


class Engine:
    """Takes what the real one takes, and `fault`."""

    def __init__(
        self,
        *,
        model_path: str,
        device: str,
        dtype: str,
        context_length: int,
        max_running_requests: int,
        chunked_prefill_size: int,
        disable_radix_cache: bool,
        disable_cuda_graph: bool,
        disable_overlap_schedule: bool,
        skip_tokenizer_init: bool,
        random_seed: int,
        attention_backend: str,
        sampling_backend: str,
        fault: str | None = None,
    ) -> None:
        assert disable_cuda_graph
        assert skip_tokenizer_init
        if "hal" in (os.environ.get("SGLANG_PLUGINS") or "hal").split(","):
            sys.stderr.write("[t] INFO hal: 3 X layers of m on cpu are served by cpu.torch (d 1)\n")
        chunk = chunked_prefill_size if chunked_prefill_size > 0 else None
        self.engine = FaultyEngine(fault, chunk, not disable_radix_cache)
        config = SimpleNamespace(dtype="torch.float32")
        self.tokenizer_manager = SimpleNamespace(model_config=config)

    def generate(
        self,
        *,
        input_ids: list[list[int]],
        sampling_params: list[dict[str, Any]],
        return_logprob: bool,
        logprob_start_len: int,
        top_logprobs_num: int,
    ) -> list[dict[str, Any]]:
        assert return_logprob
        counts = [params["max_new_tokens"] for params in sampling_params]
        found = self.engine.generate(input_ids, counts, None)
        metas = [_meta(answer, top_logprobs_num) for answer in found]
        if logprob_start_len == 0:
            (ids,) = input_ids
            scores = [None, *self.engine.score(ids, 0)[1:]]
            metas[0]["input_token_logprobs"] = [
                (p, t, None) for p, t in zip(scores, ids, strict=True)
            ]
        return [{"output_ids": [], "meta_info": meta} for meta in metas]

    def flush_cache(self) -> None:
        self.engine.forget()


def _meta(answer: Any, top: int) -> dict[str, Any]:
    return {
        "output_token_logprobs": [(s.logprob, s.token, None) for s in answer.steps],
        "output_top_logprobs": [
            [(p, t, None) for t, p in list(s.top.items())[:top]] for s in answer.steps
        ],
        "cached_tokens": answer.cached,
    }
