"""Build two small models, ask `hal` where they run, and check their text against a plain rule.

The models are real Hugging Face folders, the text comes out of `hal generate` on the CPU, and the
prediction comes from `predict.py`, a process of its own that knows only the rule. Both must agree
on every word; otherwise, or when a step fails, the demo ends non-zero with the reason.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODELS = ("induction-qwen3_5", "tables-lfm2")
DEVICES = ("cpu", "cuda", "rocm", "npu")
REFUSED = {("tables-lfm2", "npu"): "conv_state"}
"""No NPU kernel holds the state of a short convolution: a refusal that must name it."""
LENGTH = 24
SERVING = ("--max-batch", "3", "--token-budget", "9")
"""Six prompts in three slots, nine tokens a step: slots are reused and long prompts are cut."""

GUESSED = {"prompt", "prompt_ids", "ids", "text"}
MADE = GUESSED | {"index", "finish_reason"}

Row = dict[str, Any]


class Failed(Exception):
    """A step of the demo went wrong; the text is the one-line reason."""


def main() -> int:
    """Run the whole demo and return its exit status."""
    try:
        python(str(HERE / "build_models.py"), str(HERE / "models"))
        for model in MODELS:
            print(f"\n== {model}\n")
            show_checks(model)
            show_text(model)
    except Failed as failure:
        print(f"demo failed: {failure}", file=sys.stderr)
        return 1
    print("Every word is the one that the rule predicts.")
    return 0


def show_checks(model: str) -> None:
    """Ask `hal check` for every device and print the first line of each answer."""
    for device in DEVICES:
        answer = hal("check", str(HERE / "models" / model), "--device", device, allowed=(0, 1))
        said = answer.stdout.strip() or answer.stderr.strip()
        print(f"hal check --device {device:<4}  {said.partition(chr(10))[0]}")
        reason = REFUSED.get((model, device))
        if "Traceback" in answer.stderr or (device == "cpu" and answer.returncode):
            raise Failed(f"hal check of {model} on {device}: {last_line(answer)}")
        if reason and (answer.returncode == 0 or reason not in said):
            raise Failed(f"hal check does not refuse {model} on {device} for {reason}")


def show_text(model: str) -> None:
    """Predict, generate, and print both under each prompt."""
    folder, prompts = str(HERE / "models" / model), str(HERE / "prompts" / f"{model}.jsonl")
    length = ("--max-new-tokens", str(LENGTH))
    predicted = rows(python(str(HERE / "predict.py"), folder, prompts, *length), GUESSED)
    asked = ("--device", "cpu", "--prompts", prompts, *SERVING, *length, "--json")
    generated = rows(hal("generate", folder, *asked), MADE)
    generated.sort(key=lambda row: int(row["index"]))
    for guess, made in zip(predicted, generated, strict=False):
        print(f"\nprompt     {shorten(guess['prompt'])}")
        print(f"predicted  {guess['text']}")
        print(f"generated  {made['text']}")
    print()
    if differences := compare(predicted, generated):
        raise Failed(f"{model}: {'; '.join(differences)}")


def compare(predicted: list[Row], generated: list[Row]) -> list[str]:
    """Return what differs between the rule's rows and the engine's, nothing when all is equal."""
    found = [line for pair in zip(predicted, generated, strict=False) for line in _differ(*pair)]
    if len(predicted) != len(generated):
        found.append(f"{len(predicted)} prompts predicted, {len(generated)} generated")
    return found


def _differ(guess: Row, made: Row) -> Iterator[str]:
    name = f"prompt {shorten(guess['prompt'])!r}"
    if guess["prompt_ids"] != made["prompt_ids"]:
        yield f"{name} was read as other ids than the rule's"
    elif guess["ids"] != made["ids"]:
        pairs = enumerate(zip(guess["ids"], made["ids"], strict=False), start=1)
        at = next((place for place, (a, b) in pairs if a != b), None)
        sizes = f"{len(made['ids'])} words generated, {len(guess['ids'])} predicted"
        yield f"{name} differs at word {at}" if at else f"{name}: {sizes}"
    elif made["finish_reason"] != "length":
        yield f"{name} finished by {made['finish_reason']}, not by length"


def shorten(prompt: str, words: int = 8) -> str:
    """Return the end of a prompt, where the continuation starts."""
    tail = prompt.split()[-words:]
    return " ".join(tail if len(tail) == len(prompt.split()) else ["...", *tail])


def rows(answer: subprocess.CompletedProcess[str], keys: set[str]) -> list[Row]:
    """Read the JSON lines that a step printed, each with at least these keys."""
    try:
        found: list[Row] = [json.loads(line) for line in answer.stdout.splitlines() if line.strip()]
    except ValueError:
        raise Failed(f"{step(answer)} printed a line that is not JSON") from None
    if missing := sorted({key for row in found for key in keys - row.keys()}):
        raise Failed(f"{step(answer)} printed a row without {', '.join(missing)}")
    return found


def hal(*arguments: str, allowed: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
    """Run the `hal` command of this Python."""
    return python("-m", "hal.cli", *arguments, allowed=allowed)


def python(*arguments: str, allowed: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
    """Run this Python with `arguments`; a status that is not allowed fails the demo."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUTF8": "1"}  # tiny tensors
    command = [sys.executable, *arguments]
    answer = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", env=environment, check=False
    )
    if answer.returncode not in allowed:
        raise Failed(f"{step(answer)} ended with {answer.returncode}: {last_line(answer)}")
    return answer


def step(answer: subprocess.CompletedProcess[str]) -> str:
    """Return what was run: a script of this folder, or a `hal` command."""
    first, *rest = answer.args[1:]
    return f"hal {rest[1]}" if first == "-m" else Path(first).name


def last_line(answer: subprocess.CompletedProcess[str]) -> str:
    """Return the last thing a step said, where the reason of a failure stands."""
    return (answer.stderr.strip() or answer.stdout.strip() or "no output").splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
