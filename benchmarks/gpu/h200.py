"""Parity, tuning, times and sanitizers of the Triton provider on a CUDA device.

Run from the repository root, installed or not::

    PYTHONPATH=.:registry:backends/cpu:backends/triton:backends/cuda:tests \
        python3 benchmarks/gpu/h200.py --check --tune --time --out $OUT

`--check` compares every operation with the float64 oracle and stops with the list of failures.
`--tune` sweeps configurations; `--time` takes the shipped ones, interleaved with a floor.
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
from hal_triton.tuning import Config
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


def shown(config: Config | None) -> str:
    """A configuration as one word."""
    if config is None:
        return "shipped"
    blocks = ",".join(f"{name}{size}" for name, size in config.blocks.items())
    return f"{blocks},w{config.warps},s{config.stages}{',' + config.evict if config.evict else ''}"


def chosen(only: str) -> list[lines.Row]:
    """The rows whose name holds one of the texts that commas separate; all for none."""
    texts = only.split(",")
    return [row for row in lines.rows() if any(text in row.name for text in texts)]


def warm(part: tuple[int, int], only: str) -> int:
    """Compile this worker's share of all configurations, so that the sweep finds them cached."""
    first, step = part
    torch.set_num_threads(1)
    jobs = [(row, config) for row in chosen(only) for config in row.configs]
    unique = {
        (row.tunes, shown(config), row.name.split(" B=")[0]): (row, config) for row, config in jobs
    }
    done = 0
    for row, config in list(unique.values())[first::step]:
        try:
            torch.cuda.empty_cache()
            row.make(lines.provider({row.tunes: config}))[0]()
            torch.cuda.synchronize()
            done += 1
        except Exception:
            continue
    return done


def one_time(row: lines.Row, overrides: dict[str, Config]) -> float:
    """Microseconds of a row under some configurations."""
    torch.manual_seed(0)
    calls = row.make(lines.provider(overrides))
    calls[0]()
    torch.cuda.synchronize()
    return timing.graph_us(calls) if row.graph else timing.eager_us(calls[0])


def tune(only: str, seconds: float) -> list[dict[str, Any]]:
    """Time every configuration of every row, the best printed last; stops when time is up."""
    end, found = time.perf_counter() + seconds, []
    for row in chosen(only):
        times: dict[str, float] = {}
        for config in row.configs:
            if time.perf_counter() > end:
                say("tune: out of time")
                return found
            try:
                times[shown(config)] = one_time(row, {row.tunes: config})
            except Exception as fault:  # a configuration may not fit a device
                say(f"  {row.name} {shown(config)}: {type(fault).__name__}: {str(fault)[:160]}")
        ranked = sorted(times.items(), key=lambda item: item[1])
        best = "  ".join(f"{name} {us:.2f}" for name, us in ranked[:5])
        say(f"tune {row.name} [must / aim {row.goal or '-'}]: {best}")
        found.append({"row": row.name, "tunes": row.tunes, "times": dict(ranked)})
        torch.cuda.empty_cache()
    return found


def best_of(sweep: list[dict[str, Any]], row: lines.Row) -> dict[str, Config]:
    """The winner of a sweep for a row, and for the entries that other rows tune beside it."""
    chosen = {}
    for result in sweep:
        same = result["row"] == row.name or (
            result["tunes"] == "delta_rule.chunks" and row.tunes == "delta_rule.walk"
        )
        if same and result["times"]:
            name = min(result["times"], key=result["times"].get)
            source = next(r for r in lines.rows() if r.name == result["row"])
            chosen[result["tunes"]] = next(c for c in source.configs if shown(c) == name)
    return chosen


def time_rows(only: str, rounds: int, sweep: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with shipped and with swept configurations, and its floor, in turn."""
    found = []
    for row in chosen(only):
        best = best_of(sweep, row)
        readings: dict[str, list[float]] = {"shipped": [], "best": [], "floor": []}
        for _ in range(rounds):
            readings["shipped"].append(one_time(row, {}))
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
        kernels = timing.kernels_us(row.make(lines.provider(best))[0])
        say(f"time {row.name} [must / aim {row.goal or '-'}]: {'  '.join(parts)}")
        if not row.graph:
            say("     " + "  ".join(f"{name[:24]} {us:.1f}" for name, us in kernels.items()))
        config = {name: shown(c) for name, c in best.items()}
        found.append({"row": row.name, "us": readings, "best": config, "kernels": kernels})
    return found


def host() -> dict[str, float]:
    """Host microseconds of one eager decode at B = 1, with and without `out`."""
    ops, found = lines.provider({}), {}
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
    p.add_argument("--only", default="", help="texts of row names, with commas between")
    p.add_argument("--workers", type=int, default=12)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--check-limit", type=float, default=180.0, help="seconds")
    p.add_argument("--tune-limit", type=float, default=200.0, help="seconds")
    p.add_argument("--out", default=".", help="folder of h200.json")
    args = p.parse_args()
    report: dict[str, Any] = {"environment": environment()}
    say(str(report["environment"]))
    passed = True
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
        begin = time.perf_counter()
        compiled = in_parts(partial(warm, only=args.only), args.workers, 120.0)
        say(f"compiled {compiled} configurations in {time.perf_counter() - begin:.0f} s")
        report["tune"] = tune(args.only, args.tune_limit)
        save()
    if args.time:
        report["host"] = host()
        report["time"] = time_rows(args.only, args.rounds, report.get("tune", []))
        save()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
