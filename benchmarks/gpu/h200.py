"""Parity, tuning, times and sanitizers of the CUDA providers on a Hopper device.

Run from the repository root, installed or not::

    PYTHONPATH=.:registry:backends/cpu:backends/triton:backends/cuda:tests \
        python3 benchmarks/gpu/h200.py --check --tune --time --out $OUT

`--check` compares every operation with the float64 oracle and stops with the list of failures.
`--tune` sweeps as `hal tune` does, into table.json; `--time` takes the shipped configurations and
those of the sweep, interleaved with a floor.
`--sanitize` runs a few small checks under compute-sanitizer, memcheck and racecheck.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import proof
import rows as lines
import sanitize
import torch
import triton

from hal.bench import card_timing as timing
from hal.device import Device
from hal_cuda.provider import arch_of, tuning
from hal_cuda.tuner import TUNER
from hal_triton.table_file import parse
from hal_triton.tuning import Table
from support import device_checks as checks


def say(text: str) -> None:
    """One line of the report, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def in_parts(function: Any, workers: int, limit: float) -> list[Any]:
    """Results of `function((i, workers))` over processes; a worker that is lost gives its error."""
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    futures = [pool.submit(function, (i, workers)) for i in range(workers)]
    deadline, found = time.perf_counter() + limit, []
    for future in futures:
        try:
            found.append(future.result(max(1.0, deadline - time.perf_counter())))
        except Exception as fault:  # a worker's end is a finding
            found.append(f"{type(fault).__name__}: {fault}")
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
    return found


def check(workers: int, limit: float) -> tuple[list[dict[str, Any]], int]:
    """Run every parity check; the outcomes, and how many workers were lost with theirs."""
    begin, outcomes, lost = time.perf_counter(), [], []
    for part in in_parts(checks.run_part, workers, limit):
        lost += [part] if isinstance(part, str) else []
        outcomes += [] if isinstance(part, str) else part
    failed = [o for o in outcomes if o.error]
    for outcome in sorted(failed, key=lambda o: o.name):
        say(f"FAIL {outcome.name}: {outcome.error}")
    for text in lost:
        say(f"LOST a worker: {text}")
    say(f"check: {len(outcomes) - len(failed)} passed, {len(failed)} failed, {len(lost)} workers "
        f"lost, {time.perf_counter() - begin:.0f} s")  # fmt: skip
    done = [{"name": o.name, "seconds": o.seconds, "error": o.error} for o in outcomes]
    return done, len(lost)


def chosen(only: str) -> list[lines.Row]:
    """The rows whose name holds one of the texts that commas separate; all for none."""
    texts = only.split(",")
    return [row for row in lines.rows() if any(text in row.name for text in texts)]


def one_time(row: lines.Row, swept: Table | None = None) -> float:
    """Microseconds of a row as shipped, or with what a sweep found."""
    torch.manual_seed(0)
    calls = row.make(lines.provider(swept))
    calls[0]()
    torch.cuda.synchronize()
    return timing.graph_us(calls) if row.graph else timing.eager_us(calls[0])


def tune(names: str, workers: int, target: Path) -> Table:
    """What `hal tune` finds for names with commas between, or for all, written to a file."""
    wanted = [name for name in names.split(",") if name]
    sweep = TUNER.sweep(Device.parse(lines.DEVICE), wanted, 7, workers, say)
    for each in sweep.classes:
        say(f"tune {each.where}: {each.shipped} -> {each.best}" if each.changed else
            f"tune {each.where}: {each.shipped} stays")  # fmt: skip
    if sweep.ended:
        say(f"tune ended early: {sweep.ended}")
    target.write_text(json.dumps(sweep.document, indent=1))
    arch = arch_of(lines.DEVICE)
    return parse(str(target), sweep.document, arch, tuning(arch).table)


def time_rows(only: str, rounds: int, best: Table | None) -> list[dict[str, Any]]:
    """Each row as shipped, with the configurations of a sweep, and its floor, in turn.

    Kernels by themselves come last: once a process was profiled, launches of a graph overlap less.
    """
    picked = chosen(only)
    found = [{"row": row.name, "us": readings_of(row, rounds, best)} for row in picked]
    for row, each in zip(picked, found, strict=True):
        kernels = timing.kernels_us(row.make(lines.provider(best))[0])
        if not row.graph:
            parts = [f"{name[:24]} {us:.1f}" for name, us in kernels.items()]
            say(f"kernels {row.name}: {'  '.join(parts)}")
        each["kernels"] = kernels
    return found


def readings_of(row: lines.Row, rounds: int, best: Table | None) -> dict[str, list[float]]:
    """Microseconds of a row's forms, in turn."""
    readings: dict[str, list[float]] = {"shipped": [], "best": [], "floor": []}
    for _ in range(rounds):
        readings["shipped"].append(one_time(row))
        if best:
            readings["best"].append(one_time(row, best))
        if row.floor is not None:
            calls = row.floor()
            us = timing.graph_us(calls) if row.graph else timing.eager_us(calls[0])
            readings["floor"].append(us)
        torch.cuda.empty_cache()
    parts = [
        f"{name} {median(us):.2f} [{min(us):.2f}-{max(us):.2f}]"
        for name, us in readings.items()
        if us
    ]
    say(f"time {row.name} [must / aim {row.goal or '-'}]: {'  '.join(parts)}")
    return readings


def host() -> dict[str, float]:
    """Host microseconds of one eager decode at B = 1, with and without `out`."""
    ops, found = lines.provider(), {}
    for name, calls in (
        ("conv decode", lines.conv_decode(ops, 1, 8192)),
        ("decode HV32", lines.plain_decode(ops, 1, 16, 32)),
        ("fused decode HV32", lines.fused_decode(ops, 1, 16, 32)),
        ("short conv decode", lines.short_decode(ops, 1)),
    ):
        call = calls[0]
        named = {n: v for n, v in call.keywords.items() if n != "out"}
        found[name] = timing.host_us(call)
        found[f"{name}, result allocated"] = timing.host_us(partial(call.func, *call.args, **named))
    x = torch.ones(16, device=lines.DEVICE)
    found["torch add_"] = timing.host_us(lambda: x.add_(1))
    found["torch.empty"] = timing.host_us(lambda: torch.empty(1, 32, 128, device=lines.DEVICE))
    for name, us in found.items():
        say(f"host {name}: {us:.1f} us")
    return found


def environment() -> dict[str, Any]:
    """Device, versions, and which declarations the run is of."""
    major, minor = torch.cuda.get_device_capability(0)
    return {
        "device": torch.cuda.get_device_name(0),
        "arch": f"sm_{major}{minor}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "declarations": {manifest.name: manifest.digest() for manifest in proof.MANIFESTS},
    }


def main() -> int:
    """Run what was asked for; 1 if a parity check or a sanitizer failed."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag in ("check", "tune", "time", "sanitize"):
        p.add_argument(f"--{flag}", action="store_true")
    p.add_argument("--names", default="", help="names of a table to tune, with commas between")
    p.add_argument("--only", default="", help="texts of row names, with commas between")
    p.add_argument("--workers", type=int, default=12)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--check-limit", type=float, default=180.0, help="seconds")
    p.add_argument("--out", default=".", help="folder of h200.json")
    args = p.parse_args()
    report: dict[str, Any] = {"environment": environment()}
    say(str(report["environment"]))
    passed, swept = True, None
    target = Path(args.out) / "h200.json"

    def save() -> None:
        target.write_text(json.dumps(report, indent=1))

    if args.check:
        report["check"], report["lost"] = check(args.workers, args.check_limit)
        passed = not report["lost"] and not any(each["error"] for each in report["check"])
        save()
    if args.sanitize:
        report["sanitize"], clean = sanitize.run(say)
        passed = passed and clean
        save()
    if args.tune:
        swept = tune(args.names, args.workers, Path(args.out) / "table.json")
    if args.time:
        report["host"] = host()
        report["time"] = time_rows(args.only, args.rounds, swept)
        save()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
