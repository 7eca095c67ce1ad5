"""Runs one job inside SGLang's own environment: `python sglang_driver.py JOB.json RESULT.json`.

The result holds greedy tokens and their log-probabilities, or the error that `Engine()` raised; it
is missing where the model's process died, since SGLang then kills this one too. That process keeps
its own records beside the result: a line for each call of the provider, and what `hal` served.
"""

import json
import os
import sys
import traceback
from functools import wraps
from pathlib import Path
from typing import Any

RECORDS = "HAL_TEST_RECORDS"
BROKEN = "HAL_TEST_BROKEN"


def count_calls() -> None:
    """Record the provider's calls by operation, and let one of them fail."""
    from hal_cpu.conv import TorchConv
    from hal_cpu.delta_rule import TorchDeltaRule

    for name, owner in (("conv", TorchConv), ("delta_rule", TorchDeltaRule)):
        for verb in ("prefill", "decode"):
            _wrap(owner, f"{name}.{verb}", verb)


def break_the_provider() -> None:
    """Let the provider fail while it is built."""
    import hal_cpu.provider

    def broken(*given: Any, **named: Any) -> Any:
        raise RuntimeError("the provider was broken by the test")

    hal_cpu.provider.TorchProvider = broken


def _wrap(owner: Any, operation: str, verb: str) -> None:
    original, records = getattr(owner, verb), Path(os.environ[RECORDS])

    @wraps(original)  # a provider is held against the signatures of its Protocol
    def counted(*given: Any, **named: Any) -> Any:
        with (records / "calls").open("a") as file:
            file.write(f"{operation}\n")
        if operation == os.environ.get(BROKEN):
            raise RuntimeError(f"{operation} was broken by the test")
        _write_report(records)
        return original(*given, **named)

    setattr(owner, verb, counted)


def _write_report(records: Path) -> None:
    import hal_sglang

    (records / "report").write_text(json.dumps(hal_sglang.report()))


def stand_in_for_kernels() -> None:
    """Formulas for two functions that are Triton kernels alone where `sgl_kernel` is missing.

    They are the gated norm behind a linear layer and the gate of a shared expert: SGLang's in
    either case, whoever serves the linear layers.
    """
    import torch
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.srt.models import qwen2_moe

    def norm(self: Any, x: Any, g: Any) -> Any:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        gate = torch.nn.functional.silu(g.float())
        return (x.float() * scale * self.weight.float() * gate).to(x.dtype)

    def add_shared(hidden: Any, weight: Any, shared: Any, total: Any) -> None:
        total += torch.sigmoid(hidden @ weight)[:, None] * shared

    FusedRMSNormGated.forward = norm
    qwen2_moe.fused_gate_sigmoid_mul_add = add_shared


def scheduler(*given: Any, **named: Any) -> Any:
    """The model's process, with the provider's calls recorded."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    count_calls()
    stand_in_for_kernels()
    if os.environ.get(BROKEN) == "provider":
        break_the_provider()
    return run_scheduler_process(*given, **named)


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Every round of prompts as one batch each, in one engine."""
    from sglang.srt.entrypoints.engine import Engine

    class Recorded(Engine):  # type: ignore[misc] # SGLang is not there when types are checked
        """A stock engine whose model process is recorded."""

        run_scheduler_process_func = staticmethod(scheduler)

    engine = Recorded(model_path=job["model"], **job["engine"])
    sampling = {"temperature": 0, "max_new_tokens": job["tokens"], "ignore_eos": True}
    rounds = []
    for prompts in job["rounds"]:
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        rounds.append([_row(out) for out in outputs])
    engine.shutdown()
    return {"rounds": rounds}


def _row(out: Any) -> dict[str, Any]:
    meta = out["meta_info"]
    scores = [entry[0] for entry in meta["output_token_logprobs"]]
    return {"tokens": out["output_ids"], "logprobs": scores, "cached": meta["cached_tokens"]}


def main(job_file: str, result_file: str) -> None:
    """Run the job and write its result, errors included."""
    job = json.loads(Path(job_file).read_text())
    result: dict[str, Any]
    try:
        result = generate(job)
    except BaseException as error:  # whatever stopped the engine is the result
        text = "".join(traceback.format_exception(error))
        result = {"error": f"{type(error).__module__}.{type(error).__name__}", "text": text}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
