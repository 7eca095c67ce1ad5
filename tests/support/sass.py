"""Machine code of a CUDA kernel, and whether it waits for the kernel ahead before all else."""

from __future__ import annotations

import re
import subprocess
import tempfile

_WAIT = "ACQBULK"
_AHEAD = re.compile(
    r"\b(LDG?|STG?|LDGSTS|ATOMG?|REDG?|UBLK\w+|UTMA\w+|BRA|BRX|JMP|CALL|RET|EXIT)[. ]"
)
"""Memory outside a block, and whatever could lead around a wait; constants hold the arguments."""


def machine_code(cubin: bytes) -> str:
    """The instructions of the one kernel of a cubin, a line each, by Triton's disassembler."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        ran = subprocess.run(
            [knobs.nvidia.nvdisasm.path, "-c", file.name],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    return ran.stdout[ran.stdout.index("/*0000*/") :]


def waits_first(code: str) -> bool:
    """Whether no thread gets around the wait and none touches memory before."""
    before, wait, _ = code.partition(_WAIT)
    *ahead, line = before.splitlines() or [""]
    return bool(wait) and "@" not in line and not any(map(_AHEAD.search, ahead))
