"""Turn the parity checks of a device run into the report that proofs in a manifest name."""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from hal_cuda.hopper.plugin import MANIFEST as HOPPER
from hal_cuda.plugin import MANIFEST
from hal_registry import Manifest

NAMES = {"cuda.triton": {"delta.": "delta_rule."}, "cuda.hopper": {"hopper.": "delta_rule."}}
"""How a provider's checks abbreviate its interfaces."""


def operations_of(name: str, manifest: Manifest) -> tuple[str, list[str]]:
    """The dtype and the operations that a check is of; one of verify commits what it verified."""
    dtype, _, rest = name.partition(" ")
    word = rest.partition(" ")[0]
    if word.startswith("hopper.") != (manifest.name == "cuda.hopper"):
        return dtype, []
    for short, full in NAMES[manifest.name].items():
        word = full + word.removeprefix(short) if word.startswith(short) else word
    both = [word, word.replace(".verify", ".commit")] if word.endswith(".verify") else [word]
    return dtype, [operation for operation in both if operation in manifest.offers]


def operations(checks: list[dict[str, Any]], manifest: Manifest) -> dict[str, Any]:
    """Passed and failed checks by operation and dtype."""
    found: dict[str, Any] = {}
    for check in checks:
        dtype, proved = operations_of(check["name"], manifest)
        outcome = "failed" if check["error"] else "passed"
        for operation in proved:
            of = found.setdefault(operation, {"counts": Counter(), "dtypes": {}})
            of["counts"][outcome] += 1
            of["dtypes"].setdefault(dtype, Counter())[outcome] += 1
    return {name: {**of["counts"], "dtypes": of["dtypes"]} for name, of in sorted(found.items())}


def report(run: dict[str, Any], python: str) -> dict[str, Any]:
    """The report of one run, with the digests of the declarations as they are now."""
    environment = run["environment"]
    failed = sum(1 for check in run["check"] if check["error"])
    return {
        "schema": 1,
        "date": environment["date"].split()[0],
        "complete": True,
        "checks": {"passed": len(run["check"]) - failed, "failed": failed},
        "providers": [provider(run, python, manifest) for manifest in (MANIFEST, HOPPER)],
    }


def provider(run: dict[str, Any], python: str, manifest: Manifest) -> dict[str, Any]:
    """What the run says of one provider."""
    environment = run["environment"]
    versions = {"python": python, "torch": environment["torch"], "triton": environment["triton"]}
    return {
        "provider": manifest.name,
        "digest": manifest.digest(),
        "versions": versions,
        "device": {
            "type": manifest.device,
            "arch": "sm_90",
            "level": "hardware",
            "machine": environment["device"],
        },
        "operations": operations(run["check"], manifest),
        "sanitizer": {tool: each["tail"][-1] for tool, each in run.get("sanitize", {}).items()},
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
