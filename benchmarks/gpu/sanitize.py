"""A few small checks under compute-sanitizer: memcheck and racecheck, side by side.

Every tool has several children that share the checks out. Run by itself, this is a child: its part
of the checks alone, by number and count of parts, without a sanitizer around them.
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

PARTS = 7
"""Children of a tool; both tools run at once."""


def start(tool: str, part: int, parts: int) -> subprocess.Popen[str]:
    """One child under one tool; tensors get allocations of their own, so that strays are seen."""
    sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    return subprocess.Popen(
        [*sanitizer, sys.executable, __file__, str(part), str(parts)],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def end(process: subprocess.Popen[str], deadline: float) -> tuple[int, list[str]]:
    """How a child ended, by the deadline at the latest, and its last lines."""
    try:
        text, _ = process.communicate(timeout=max(1.0, deadline - time.perf_counter()))
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
    return process.returncode, [line for line in text.splitlines() if line.strip()][-4:]


def run(say: Callable[[str], None], parts: int = PARTS) -> tuple[dict[str, Any], bool]:
    """What the first unclean child of each tool said, or its first, and whether all were clean."""
    begin = time.perf_counter()
    running = {tool: [start(tool, i, parts) for i in range(parts)] for tool in TOOLS}
    found, clean = {}, True
    for tool, children in running.items():
        ends = [end(process, begin + LIMIT) for process in children]
        seconds = time.perf_counter() - begin
        failed = [i for i, (code, _) in enumerate(ends) if code]
        code, tail = ends[failed[0] if failed else 0]
        found[tool] = {"exit": code, "tail": tail, "seconds": seconds, "failed": failed}
        clean = clean and not failed
        say(f"sanitize {tool}: {parts - len(failed)} of {parts} parts clean, {seconds:.0f} s")
        for part in failed or [0]:
            for line in ends[part][1]:
                say(f"     part {part}: {line[:200]}")
    return found, clean


def child(part: int, parts: int) -> int:
    """Run every parts-th small check, which raises where one fails; 1 if a name is unknown."""
    from support import device_checks as checks

    mine, ran = checks.SMALL[part::parts], 0
    for name, check in checks.all_checks():
        if name in mine:
            check()
            ran += 1
    sys.stdout.write(f"{ran} of {len(mine)} checks ran\n")
    return 0 if ran == len(mine) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    first, count = (int(word) for word in sys.argv[1:] or ("0", "1"))
    sys.exit(child(first, count))
