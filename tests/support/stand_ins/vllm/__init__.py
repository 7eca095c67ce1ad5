"""Stands for vLLM: what the self-check calls of it, over the engine in plain Python."""

import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from support.faulty_engine import FaultyEngine

__version__ = "0.32.0"
REFUSED = "hal.Unsupported: m cannot run on cpu: cpu.torch is left out"


@dataclass
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True


class LLM:
    """Takes what the real one takes, and `fault` and `block`."""

    def __init__(
        self,
        *,
        model: str,
        dtype: str,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
        skip_tokenizer_init: bool,
        enforce_eager: bool,
        seed: int,
        fault: str | None = None,
        block: int = 16,
    ) -> None:
        assert enforce_eager
        assert skip_tokenizer_init
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        if fault == "fails in a child":
            sys.stderr.write("Traceback:\nmod.OddError: no memory\nkilled\n")
            sys.stderr.flush()
            os._exit(3)
        if fault == "refuses in a child":
            sys.stderr.write(f"(Core pid=7) ERROR [core.py:9] {REFUSED}\nmod.OddError: gone\n")
            sys.stderr.flush()
            raise RuntimeError("core initialization failed, see above")
        if fault == "dies":
            os._exit(3)
        if fault == "hangs":
            import time

            time.sleep(600)
        if fault == "refused":
            from hal import select

            select("gpu", model)
        if fault == "raises":
            raise RuntimeError("no kernel\nfor heads of 16")
        if fault == "does not load hal":
            sys.stderr.write("Failed to load plugin hal\nTypeError: Pin takes 5 arguments\n")
            fault = None
        elif "hal" in os.environ.get("VLLM_PLUGINS", "hal").split(","):
            sys.stderr.write("INFO 1 hal: 3 X layers of m on cpu are served by cpu.torch (d 1)\n")
        self.longest = max_model_len
        chunk = max_num_batched_tokens if max_num_batched_tokens < max_model_len else None
        dtype = "float32" if dtype == "auto" else dtype
        self.engine = FaultyEngine(fault, chunk, enable_prefix_caching, 0.0, dtype)
        cache = SimpleNamespace(block_size=block, enable_prefix_caching=enable_prefix_caching)
        config = SimpleNamespace(
            cache_config=cache, model_config=SimpleNamespace(dtype=f"torch.{dtype}")
        )
        self.llm_engine = SimpleNamespace(vllm_config=config)

    def generate(
        self, prompts: list[Any], sampling: list[SamplingParams], use_tqdm: bool
    ) -> list[Any]:
        ids = [tuple(prompt["prompt_token_ids"]) for prompt in prompts]
        for prompt, params in zip(ids, sampling, strict=True):
            assert len(prompt) + params.max_tokens <= self.longest
            assert params.temperature == 0.0
        if sampling[0].prompt_logprobs is not None:
            return [SimpleNamespace(prompt_logprobs=self._scores(ids[0]))]
        assert all(params.ignore_eos for params in sampling)
        counts = [params.max_tokens for params in sampling]
        return [_output(answer) for answer in self.engine.generate(ids, counts, None)]

    def reset_prefix_cache(self) -> None:
        self.engine.forget()

    def _scores(self, ids: tuple[int, ...]) -> list[Any]:
        found = self.engine.score(ids, 0)
        listed = [{t: SimpleNamespace(logprob=p)} for t, p in zip(ids, found, strict=True)]
        return [None, *listed[1:]]


def _output(answer: Any) -> Any:
    listed = [
        {t: SimpleNamespace(logprob=p) for t, p in {**s.top, s.token: s.logprob}.items()}
        for s in answer.steps
    ]
    first = SimpleNamespace(token_ids=list(answer.tokens), logprobs=listed)
    return SimpleNamespace(outputs=[first], num_cached_tokens=answer.cached)
