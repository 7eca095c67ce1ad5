"""A stock vLLM, with or without the plugin of `hal`, as the self-check asks it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hal.integrations.verify.record import Answer, Facts, Setup, Step

if TYPE_CHECKING:
    from collections.abc import Sequence


class VllmServed:
    """One `vllm.LLM` in eager mode: whole prompts and no cache, or chunks and cached prefixes."""

    def __init__(self, setup: Setup) -> None:
        self._vllm: Any = importlib.import_module("vllm")
        self._top = setup.top
        self._prefix = setup.prefix
        asked: dict[str, Any] = {
            "model": setup.folder,
            "dtype": setup.dtype or "auto",
            "max_model_len": setup.max_len,
            "max_num_seqs": setup.max_batch,
            "max_num_batched_tokens": max(setup.budget, setup.max_batch),
            "enable_prefix_caching": setup.prefix,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "seed": 0,
        }
        self._llm: Any = self._vllm.LLM(**{**asked, **setup.options})
        self.facts = self._facts()

    def generate(
        self, prompts: Sequence[Sequence[int]], counts: Sequence[int], chunk: int | None
    ) -> list[Answer]:
        """Serve the prompts at once; the engine cuts them into the chunks it was opened with."""
        sampling = [
            self._sampling(max_tokens=count, logprobs=self._top, ignore_eos=True)
            for count in counts
        ]
        return [_answer(found) for found in self._run(prompts, sampling)]

    def score(self, ids: Sequence[int], start: int) -> list[float]:
        """The prompt log-probabilities of `ids[start:]`; such a request reads no cache."""
        (found,) = self._run([ids], [self._sampling(max_tokens=1, prompt_logprobs=0)])
        listed = found.prompt_logprobs
        return [listed[at][ids[at]].logprob for at in range(start, len(ids))]

    def forget(self) -> None:
        """Drop cached prefixes."""
        if self._prefix:
            self._llm.reset_prefix_cache()

    def _run(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Any]) -> list[Any]:
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs: list[Any] = self._llm.generate(given, list(sampling), use_tqdm=False)
        return outputs

    def _sampling(self, **wanted: Any) -> Any:
        return self._vllm.SamplingParams(temperature=0.0, detokenize=False, **wanted)

    def _facts(self) -> Facts:
        config = self._llm.llm_engine.vllm_config
        platforms = importlib.import_module("vllm.platforms")
        return Facts(
            engine="vllm",
            version=self._vllm.__version__,
            device=platforms.current_platform.device_type,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            block=config.cache_config.block_size,
            no_prefix=None if config.cache_config.enable_prefix_caching else "not switched on",
        )


def _answer(found: Any) -> Answer:
    out = found.outputs[0]
    steps = (
        Step(token, listed[token].logprob, {i: each.logprob for i, each in listed.items()})
        for token, listed in zip(out.token_ids, out.logprobs, strict=True)
    )
    return Answer(tuple(steps), found.num_cached_tokens or 0)
