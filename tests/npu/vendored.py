"""The vendor's own kernels under the adapter, at every point that the manifest declares.

Run as `python tests/npu/vendored.py [WORDS...]` with `HAL_SGL_KERNEL_NPU` naming a checkout and a
Triton 3.7 or 3.8 on the path; WORDS keep the trials whose name holds one of them. The oracle, the
cases and the limits are the conformance kit's. Prints one table line an operation and dtype, and
fails where a trial does.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
sys.path.insert(0, str(Path(__file__).parents[1]))

from hal.testing.case import Errors
from hal.testing.plan import Plan, Trial
from hal.testing.verify_cases import VerifyCase, accept
from hal_npu.plugin import MANIFEST

VARIABLE = "HAL_SGL_KERNEL_NPU"
"""Names a checkout of the vendor's repository, or its package folder."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one trial gave: the errors, the limits, and how much of them was used."""

    trial: str
    operation: str
    dtype: str
    errors: Errors
    limits: tuple[float, float]

    @property
    def good(self) -> bool:
        """Whether the trial passed."""
        return self.errors.within(self.limits)


def trials(words: Iterable[str]) -> Iterator[Trial]:
    """The trials of the manifest, all or those that hold one of the words."""
    plan = Plan.of(MANIFEST)
    for trial in (*plan.trials, *plan.verify):
        if not words or any(word in str(trial) for word in words):
            yield trial


def run(trial: Trial) -> Row:
    """One trial through a provider of its layouts."""
    from hal_npu.provider import AscendProvider

    provider = AscendProvider("npu", {"layouts": trial.layouts})
    interface, _, verb = trial.operation.partition(".")
    served: Any = getattr(provider, interface)
    case = trial.case()
    if verb == "verify":
        verify = VerifyCase.of(case, None, accept(case.rows))
        errors, touched = verify.errors(served, provider.scratch_spec)
        assert touched == 0, f"{trial}: verify changed {touched} committed elements"
    else:
        errors = case.errors(getattr(served, verb))
    return Row(
        str(trial),
        trial.operation,
        trial.settings["dtype"],
        errors,
        case.limits(trial.kind),
    )


def table(rows: Iterable[Row]) -> Iterator[str]:
    """One line an operation and dtype: trials, and the worst errors beside their limits."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.operation, row.dtype].append(row)
    yield "| operation | dtype | trials | result | limit | state | limit |"
    yield "|---|---|---|---|---|---|---|"
    for (operation, dtype), group in sorted(groups.items()):
        out = max(max(row.errors.out, row.errors.head) for row in group)
        state = max(row.errors.state for row in group)
        limits = group[0].limits
        shown = " | ".join(f"{x:.1e}" if x else "exact" for x in (out, limits[0], state, limits[1]))
        yield f"| {operation} | {dtype} | {len(group)} | {shown} |"


def main(words: list[str]) -> int:
    """Run the trials; 0 where all pass."""
    from npu import shims

    warnings.filterwarnings("ignore", "tl.make_block_ptr is deprecated")
    shims.install(Path(os.environ[VARIABLE]))
    rows = []
    for trial in trials(words):
        rows.append(run(trial))
        print("ok  " if rows[-1].good else "FAIL", trial, rows[-1].errors, flush=True)
    print("\n".join(table(rows)))
    return int(not rows or not all(row.good for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
