"""A stock SGLang, with or without the plugin of `hal`, as the self-check asks it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from hal.integrations.verify.record import Answer, Facts, Setup, Step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WHOLE: Final = -1
"""The chunk size with which SGLang cuts no prompt."""
RESERVED: Final = 16
"""Positions that SGLang keeps to itself."""
ON_CPU: Final = {"attention_backend": "torch_native", "sampling_backend": "pytorch"}


class SglangServed:
    """One `sglang.Engine` without graphs: whole prompts and no cache, or chunks and prefixes."""

    def __init__(self, setup: Setup) -> None:
        sglang: Any = importlib.import_module("sglang")
        self._top = setup.top
        self._engine: Any = sglang.Engine(**engine_arguments(setup))
        self.facts = Facts(
            engine="sglang",
            version=sglang.__version__,
            device=setup.device,
            dtype=_dtype(setup, self._engine),
            no_prefix=None if setup.prefix else "not asked for",
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], counts: Sequence[int], chunk: int | None
    ) -> list[Answer]:
        """Serve the prompts at once; the engine cuts them into the chunks it was opened with."""
        asked = [
            {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True} for count in counts
        ]
        return [_answer(found) for found in self._run(prompts, asked, -1)]

    def score(self, ids: Sequence[int], start: int) -> list[float]:
        """The log-probabilities of `ids[start:]` as parts of a prompt."""
        (found,) = self._run([ids], [{"temperature": 0.0, "max_new_tokens": 1}], 0)
        listed = found["input_token_logprobs"]
        return [float(entry[0]) for entry in listed[start:]]

    def forget(self) -> None:
        """Drop cached prefixes."""
        self._engine.flush_cache()

    def _run(
        self, prompts: Sequence[Sequence[int]], asked: Sequence[Mapping[str, Any]], start: int
    ) -> list[Mapping[str, Any]]:
        """The `meta_info` of each prompt, with log-probabilities of the prompt from `start` on."""
        outputs = self._engine.generate(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params=[dict(each) for each in asked],
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=self._top,
        )
        return [each["meta_info"] for each in outputs]


def engine_arguments(setup: Setup) -> dict[str, Any]:
    """What `sglang.Engine` is made with; the setup's options go over all of it."""
    asked: dict[str, Any] = {
        "model_path": setup.folder,
        "device": setup.device,
        "dtype": setup.dtype or "auto",
        "context_length": setup.max_len + RESERVED,
        "max_running_requests": setup.max_batch,
        "chunked_prefill_size": max(setup.chunks, default=WHOLE),
        "disable_radix_cache": not setup.prefix,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "skip_tokenizer_init": True,
        "random_seed": 0,
        **(ON_CPU if setup.device == "cpu" else {}),
    }
    return {**asked, **setup.options}


def _dtype(setup: Setup, engine: Any) -> str:
    """The dtype that was asked for, else the one that SGLang took from the config."""
    if setup.dtype is not None:
        return setup.dtype
    return str(engine.tokenizer_manager.model_config.dtype).removeprefix("torch.")


def _answer(found: Mapping[str, Any]) -> Answer:
    chosen, likeliest = found["output_token_logprobs"], found["output_top_logprobs"]
    steps = (
        Step(token, logprob, {i: each for each, i, *_ in top})
        for (logprob, token, *_), top in zip(chosen, likeliest, strict=True)
    )
    return Answer(tuple(steps), found.get("cached_tokens", 0))
