"""Turn the parity checks of a device run into the report that proofs in a manifest name."""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from hal_cuda.plugin import MANIFEST

NAMES = {"delta.": "delta_rule."}
"""How checks abbreviate interfaces."""


def operation_of(name: str) -> tuple[str, str]:
    """The dtype and the operation that a check is of; checks of several are of none."""
    dtype, _, rest = name.partition(" ")
    word = rest.partition(" ")[0]
    for short, full in NAMES.items():
        word = full + word.removeprefix(short) if word.startswith(short) else word
    return dtype, word if word in MANIFEST.offers else ""


def operations(checks: list[dict[str, Any]]) -> dict[str, Any]:
    """Passed and failed checks by operation and dtype."""
    found: dict[str, Any] = {}
    for check in checks:
        dtype, operation = operation_of(check["name"])
        if not operation:
            continue
        outcome = "failed" if check["error"] else "passed"
        of = found.setdefault(operation, {"counts": Counter(), "dtypes": {}})
        of["counts"][outcome] += 1
        of["dtypes"].setdefault(dtype, Counter())[outcome] += 1
    return {name: {**of["counts"], "dtypes": of["dtypes"]} for name, of in sorted(found.items())}


def report(run: dict[str, Any], python: str) -> dict[str, Any]:
    """The report of one run, with the digest of the declaration as it is now."""
    environment = run["environment"]
    versions = {"python": python, "torch": environment["torch"], "triton": environment["triton"]}
    provider = {
        "provider": MANIFEST.name,
        "digest": MANIFEST.digest(),
        "versions": versions,
        "device": {
            "type": MANIFEST.device,
            "arch": "sm_90",
            "level": "hardware",
            "machine": environment["device"],
        },
        "operations": operations(run["check"]),
        "sanitizer": {tool: each["tail"][-1] for tool, each in run.get("sanitize", {}).items()},
    }
    failed = sum(1 for check in run["check"] if check["error"])
    return {
        "schema": 1,
        "date": environment["date"].split()[0],
        "complete": True,
        "checks": {"passed": len(run["check"]) - failed, "failed": failed},
        "providers": [provider],
    }


def main() -> int:
    """Write the report beside the others."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("run", help="h200.json of a run with --check")
    p.add_argument("target", help="the report to write")
    p.add_argument("--python", default="3.12", help="version of Python on the device")
    args = p.parse_args()
    found = report(json.loads(Path(args.run).read_text()), args.python)
    Path(args.target).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
