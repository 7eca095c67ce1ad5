"""A few small checks under compute-sanitizer: memcheck and racecheck, side by side.

Run by itself, this is the child: the checks alone, without a sanitizer around them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck")
LIMIT = 100.0
"""Seconds for a tool, compilation included."""


def start(tool: str) -> subprocess.Popen[str]:
    """The child under one tool; tensors get allocations of their own, so that strays are seen."""
    sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    return subprocess.Popen(
        [*sanitizer, sys.executable, __file__],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(say: Callable[[str], None]) -> tuple[dict[str, Any], bool]:
    """What each tool said, and whether both were clean."""
    begin, found, clean = time.perf_counter(), {}, True
    running = {tool: start(tool) for tool in TOOLS}
    for tool, process in running.items():
        try:
            text, _ = process.communicate(timeout=max(1.0, begin + LIMIT - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
        ended = process.returncode
        tail = [line for line in text.splitlines() if line.strip()][-4:]
        found[tool] = {"exit": ended, "tail": tail, "seconds": time.perf_counter() - begin}
        clean = clean and ended == 0
        say(f"sanitize {tool}: exit {ended}, {time.perf_counter() - begin:.0f} s")
        for line in tail:
            say(f"     {line[:200]}")
    return found, clean


def child() -> int:
    """Run the small checks, which raise where one fails; 1 if a name among them is unknown."""
    from support import device_checks as checks

    ran = 0
    for name, check in checks.all_checks():
        if name in checks.SMALL:
            check()
            ran += 1
    sys.stdout.write(f"{ran} of {len(checks.SMALL)} checks ran\n")
    return 0 if ran == len(checks.SMALL) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    sys.exit(child())
