"""Time a stock vLLM on a CPU beside the same vLLM through hal, in one interleaved run.

Run it with `OMP_NUM_THREADS=1` and the python of `make engine-vllm`. Both engines stay open in
processes of their own and are asked in turns. Weights are vLLM's dummies, on which times do not
depend. A decode is a step of all rows; a prefill is a step with all prompts, start to first token.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROWS, PROMPT, TOKENS = 4, 256, 33
SHARED = {
    "vocab_size": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 1024,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "falcon_h1": {
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_d_ssm": 1024,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": 512,
        "block_dim": 512,
        "block_ff_dim": 1024,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
}
ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def worker(folder: str) -> None:
    """Open an engine, and answer each line on stdin with its times and who served."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=ROWS,
        max_num_batched_tokens=ROWS * PROMPT,
        enable_prefix_caching=False,
        enforce_eager=True,
        skip_tokenizer_init=True,
    )
    prompts = [
        {"prompt_token_ids": [3 + (7 * i + row) % 900 for i in range(PROMPT)]}
        for row in range(ROWS)
    ]

    def cpu_ms(tokens: int) -> float:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        begin = time.process_time()
        llm.generate(prompts, sampling, use_tqdm=False)
        return 1e3 * (time.process_time() - begin)

    cpu_ms(TOKENS)
    for _ in sys.stdin:
        prefill = cpu_ms(1)
        decode = (cpu_ms(TOKENS) - prefill) / (TOKENS - 1)
        calls = sum(sum(each["calls"].values()) for each in reports())
        answers.write(json.dumps({"prefill": prefill, "decode": decode, "calls": calls}) + "\n")
        answers.flush()


def reports() -> list[Any]:
    """What hal served in this process; nothing where its plugin was left out."""
    if "hal_vllm.layers" not in sys.modules:
        return []
    import hal_vllm

    found: list[Any] = hal_vllm.report()
    return found


@contextmanager
def engine(folder: Path, plugins: str) -> Iterator[subprocess.Popen[str]]:
    """An engine with these plugins, ended afterwards."""
    with (folder / f"log-{plugins or 'stock'}").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(folder)],
            env={**os.environ, **ENGINE, "VLLM_PLUGINS": plugins},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def ask(process: subprocess.Popen[str]) -> dict[str, float]:
    """One measurement of an engine."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the engine has no pipes")
    process.stdin.write("\n")
    process.stdin.flush()
    found: dict[str, float] = json.loads(process.stdout.readline())
    return found


def spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def compare(name: str, rounds: int) -> None:
    """Print a row of both phases: medians and ranges of CPU milliseconds."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        config = {"model_type": name, **SHARED, **MODELS[name]}
        (folder / "config.json").write_text(json.dumps(config))
        with engine(folder, "") as stock, engine(folder, "hal") as ours:
            found = [(ask(stock), ask(ours)) for _ in range(rounds)]
    if any(theirs["calls"] or not mine["calls"] for theirs, mine in found):
        raise RuntimeError(f"{name}: hal served the stock engine, or not its own")
    for phase in ("decode", "prefill"):
        theirs, mine = ([each[side][phase] for each in found] for side in (0, 1))
        ratio = median(b / a for a, b in zip(theirs, mine, strict=True))
        print(f"| {name} {phase} | {spread(theirs)} | {spread(mine)} | {ratio:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    given = parser.parse_args()
    if given.worker:
        worker(given.worker)
        return
    print("| case | stock, ms | through hal, ms | median ratio |\n|---|---|---|---|", flush=True)
    for name in given.models:
        compare(name, given.rounds)


if __name__ == "__main__":
    main()
