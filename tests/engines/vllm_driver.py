"""Runs one job inside vLLM's own environment: `python vllm_driver.py JOB.json RESULT.json`.

The result holds greedy tokens and their log-probabilities, what `hal` served, how often each
operation of its provider was called, or the error that the engine stopped with.
"""

import json
import sys
import traceback
from collections import Counter
from functools import wraps
from pathlib import Path
from typing import Any

CALLS: Counter[str] = Counter()


def count_calls(broken: str | None) -> None:
    """Count the provider's calls by operation, and let one of them fail."""
    from hal_cpu.conv import TorchConv
    from hal_cpu.delta_rule import TorchDeltaRule
    from hal_cpu.scan import TorchScan

    for name, owner in (("conv", TorchConv), ("delta_rule", TorchDeltaRule), ("scan", TorchScan)):
        for verb in ("prefill", "decode"):
            _wrap(owner, f"{name}.{verb}", verb, broken)


def _wrap(owner: Any, operation: str, verb: str, broken: str | None) -> None:
    original = getattr(owner, verb)

    @wraps(original)  # a provider is held against the signatures of its Protocol
    def counted(*given: Any, **named: Any) -> Any:
        CALLS[operation] += 1
        if operation == broken:
            raise RuntimeError(f"{operation} was broken by the test")
        return original(*given, **named)

    setattr(owner, verb, counted)


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Every round of prompts as one batch each, in one engine."""
    from vllm import LLM, SamplingParams

    asked = {"skip_tokenizer_init": True, "enforce_eager": True, "seed": 0, **job["engine"]}
    llm = LLM(model=job["model"], **asked)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=job["tokens"], logprobs=0, ignore_eos=True, detokenize=False
    )
    rounds = []
    for prompts in job["rounds"]:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        rounds.append([_row(out) for out in outputs])
    return {"rounds": rounds}


def _row(out: Any) -> dict[str, Any]:
    first = out.outputs[0]
    tokens = list(first.token_ids)
    logprobs = [step[token].logprob for token, step in zip(tokens, first.logprobs, strict=True)]
    return {"tokens": tokens, "logprobs": logprobs, "cached": out.num_cached_tokens}


def main(job_file: str, result_file: str) -> None:
    """Run the job and write its result, errors included."""
    job = json.loads(Path(job_file).read_text())
    result: dict[str, Any]
    try:
        count_calls(job.get("broken"))
        result = generate(job)
    except BaseException as error:  # whatever stopped the engine is the result
        text = "".join(traceback.format_exception(error))
        result = {"error": f"{type(error).__module__}.{type(error).__name__}", "text": text}
    if "hal_vllm" in sys.modules:
        result["report"] = sys.modules["hal_vllm"].report()
    result["calls"] = dict(CALLS)
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
