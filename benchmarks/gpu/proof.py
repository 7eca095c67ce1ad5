"""Turn the parity checks of a device run into the report that proofs in a manifest name.

The run says on which arch it ran and which declarations it is of; where these are no longer the
declarations of the code, nothing is written. Older runs say neither: then the report lists what was
assumed.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from hal_cuda.hopper.plugin import MANIFEST as HOPPER
from hal_cuda.plugin import MANIFEST
from hal_registry import Manifest

MANIFESTS = (MANIFEST, HOPPER)
RECORDED = ("arch", "python", "declarations")
"""What a run has to say of itself, so that its report assumes nothing."""

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


def mismatches(run: dict[str, Any]) -> list[str]:
    """Why a run proves nothing of the declarations as they are now."""
    if "check" not in run:
        return ["the run has no parity checks; h200.py makes them with --check"]
    recorded = run["environment"].get("declarations")
    if recorded is None:
        return []
    return [
        f"{manifest.name}: the run is of declaration {recorded.get(manifest.name, 'none')}, "
        f"the code has {manifest.digest()}; run the checks again"
        for manifest in MANIFESTS
        if recorded.get(manifest.name) != manifest.digest()
    ]


def report(run: dict[str, Any], **given: str) -> dict[str, Any]:
    """The report of one run; `given` is what to assume where the run does not say it."""
    environment = {**given, **run["environment"]}
    failed = sum(1 for check in run["check"] if check["error"])
    return {
        "schema": 1,
        "date": environment["date"].split()[0],
        "complete": not run.get("lost"),
        "assumed": [name for name in RECORDED if name not in run["environment"]],
        "checks": {"passed": len(run["check"]) - failed, "failed": failed},
        "providers": [provider(run, environment, manifest) for manifest in MANIFESTS],
    }


def provider(
    run: dict[str, Any], environment: dict[str, Any], manifest: Manifest
) -> dict[str, Any]:
    """What the run says of one provider."""
    versions = {name: environment[name] for name in ("python", "torch", "triton")}
    return {
        "provider": manifest.name,
        "digest": manifest.digest(),
        "versions": versions,
        "device": {
            "type": manifest.device,
            "arch": environment["arch"],
            "level": "hardware",
            "machine": environment["device"],
        },
        "operations": operations(run["check"], manifest),
        "sanitizer": {tool: each["tail"][-1] for tool, each in run.get("sanitize", {}).items()},
    }


def main() -> int:
    """Write the report beside the others."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("run", help="h200.json of a run with --check")
    p.add_argument("target", help="the report to write")
    p.add_argument("--python", default="3.12", help="version of Python, where the run has none")
    p.add_argument("--arch", default="sm_90", help="arch of the device, where the run has none")
    args = p.parse_args()
    run = json.loads(Path(args.run).read_text())
    if wrong := mismatches(run):
        sys.stderr.write("\n".join(wrong) + "\n")
        return 1
    found = report(run, python=args.python, arch=args.arch)
    if found["assumed"]:
        sys.stderr.write(f"the run does not say: {', '.join(found['assumed'])}; assumed\n")
    Path(args.target).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
