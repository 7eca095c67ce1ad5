"""Block sizes by operation and amount of work; vendors hand over tables of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

UNBOUNDED: Final = float("inf")
"""The limit of a table's last entry."""


@dataclass(frozen=True, slots=True)
class Config:
    """Block sizes by name, and what Triton is told beside them."""

    blocks: Mapping[str, int]
    warps: int = 4
    stages: int = 1
    evict: str = ""
    registers: int = 0
    """At most so many a thread, so that more programs fit; 0 leaves it to the compiler. NVIDIA."""

    @property
    def options(self) -> dict[str, int]:
        """Launch options of Triton."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}

    def for_inputs(self, itemsize: int) -> "Config":
        """The same without a limit of registers where inputs are wider than the 16 bits it is of.

        What a step holds of its float32 inputs would spill under a limit that suits narrow ones.
        """
        return self if itemsize <= 2 else replace(self, registers=0)


Table = Mapping[str, Sequence[tuple[float, Config]]]
"""By operation, configurations with the largest work that each is for, in rising order."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a device is tuned with: block sizes, a fast silu, and the precision of the chunk solve.

    `silu` is exact; `fast_silu` may be wrong by 2^-11 and serves results that are rounded to
    bfloat16. Both are Triton device functions. `solve` is the input precision of float32
    products in the chunk solve of bfloat16 activations; `drafts` are those of the ones in a
    verify of 16-bit activations, with the state and behind it.
    """

    table: Table
    silu: object
    fast_silu: object
    solve: str = "ieee"
    overrides: Mapping[str, Config] = field(default_factory=dict)
    drafts: tuple[str, str] = ("bf16x3", "bf16x6")

    def pick(self, operation: str, work: float) -> Config:
        """The configuration of an operation for an amount of work, in the operation's own unit."""
        if operation in self.overrides:
            return self.overrides[operation]
        return next(config for limit, config in self.table[operation] if work <= limit)


def block(size: int, least: int = 1) -> int:
    """The power of two that covers `size`."""
    return max(least, 1 << max(0, size - 1).bit_length())


DEFAULT: Final[Table] = {
    "conv.prefill": ((UNBOUNDED, Config({"BT": 64, "BG": 4, "BC": 256}, warps=2)),),
    "conv.prefill.float32": ((UNBOUNDED, Config({"BT": 64, "BG": 4, "BC": 256}, warps=2)),),
    "conv.decode": ((UNBOUNDED, Config({"BC": 512}, warps=8)),),
    "short_conv.prefill": ((UNBOUNDED, Config({"BT": 64, "BG": 4, "BC": 256}, warps=2)),),
    "short_conv.prefill.float32": ((UNBOUNDED, Config({"BT": 64, "BG": 4, "BC": 256}, warps=2)),),
    "short_conv.decode": ((UNBOUNDED, Config({"BC": 512}, warps=8)),),
    "delta_rule.decode": (
        (1024, Config({"BV": 8}, warps=1, evict="evict_first")),
        (UNBOUNDED, Config({"BV": 8}, warps=1)),
    ),
    "delta_rule.decode_fused": (
        (64, Config({"BV": 8}, warps=1)),
        (UNBOUNDED, Config({"BV": 32}, warps=1)),
    ),
    "delta_rule.decode_fused.channel": (
        (64, Config({"BV": 8}, warps=1)),
        (UNBOUNDED, Config({"BV": 32}, warps=1)),
    ),
    "delta_rule.chunks": ((UNBOUNDED, Config({"BT": 64}, warps=8)),),
    "delta_rule.walk": (
        (64, Config({"BV": 16}, warps=4, stages=2)),
        (UNBOUNDED, Config({"BV": 64}, warps=8, stages=2)),
    ),
    "delta_rule.recurrent": ((UNBOUNDED, Config({"BV": 8}, warps=1)),),
    "delta_rule.decode_fused.norm": (
        (64, Config({"BV": 8}, warps=1)),
        (UNBOUNDED, Config({"BV": 128}, warps=4)),
    ),
    "delta_rule.chunks.wide": ((UNBOUNDED, Config({"BT": 64}, warps=8)),),
    "delta_rule.chunks.float16": ((UNBOUNDED, Config({"BT": 32}, warps=4)),),
    "delta_rule.walk.float16": ((UNBOUNDED, Config({"BV": 16}, warps=8)),),
    "delta_rule.chunks.float16.wide": ((UNBOUNDED, Config({"BT": 16}, warps=4)),),
    "delta_rule.walk.float16.wide": ((UNBOUNDED, Config({"BV": 16}, warps=8)),),
    "delta_rule.walk.wide": ((UNBOUNDED, Config({"BV": 16}, warps=8)),),
    "delta_rule.channel_chunks": ((UNBOUNDED, Config({"BT": 64}, warps=4)),),
    "delta_rule.channel_walk": (
        (64, Config({"BV": 16}, warps=4, stages=2)),
        (UNBOUNDED, Config({"BV": 64}, warps=8)),
    ),
    "norm": ((UNBOUNDED, Config({"BR": 8}, warps=4)),),
    "scan.decode": ((UNBOUNDED, Config({"BP": 16}, warps=1)),),
    "scan.decode.channel": ((UNBOUNDED, Config({"BP": 64}, warps=1)),),
    "scan.recurrent": ((UNBOUNDED, Config({"BP": 32}, warps=1)),),
    "scan.prepare": ((UNBOUNDED, Config({"BR": 16}, warps=4)),),
    "scan.walk": ((UNBOUNDED, Config({"BP": 32, "BT": 32}, warps=4)),),
    "scan.walk.wide": ((UNBOUNDED, Config({"BP": 16, "BT": 32}, warps=4)),),
    "scan.walk.float16": ((UNBOUNDED, Config({"BP": 16, "BT": 32}, warps=4)),),
    "scan.walk.float16.wide": ((UNBOUNDED, Config({"BP": 16, "BT": 16}, warps=8)),),
    "scan.walk.float32": ((UNBOUNDED, Config({"BP": 16, "BT": 16}, warps=4)),),
    "scan.walk.float32.wide": ((UNBOUNDED, Config({"BP": 16, "BT": 16}, warps=8)),),
    "scan.verify": ((UNBOUNDED, Config({"BP": 16}, warps=1)),),
    "scan.verify.channel": ((UNBOUNDED, Config({"BP": 32}, warps=1)),),
    "scan.commit": ((UNBOUNDED, Config({"BP": 16}, warps=1)),),
    "scan.commit.channel": ((UNBOUNDED, Config({"BP": 64}, warps=1)),),
    "delta_rule.drafts": ((UNBOUNDED, Config({}, warps=1)),),
    "delta_rule.verify": ((UNBOUNDED, Config({"BV": 32, "BK": 128}, warps=2)),),
    "delta_rule.verify.long": ((UNBOUNDED, Config({"BV": 32, "BK": 64}, warps=2)),),
    "delta_rule.verify.cut": ((UNBOUNDED, Config({"BV": 32, "BK": 64}, warps=2)),),
    "delta_rule.verify.cut.long": ((UNBOUNDED, Config({"BV": 32, "BK": 64}, warps=2)),),
    "delta_rule.verify.float32": ((UNBOUNDED, Config({"BV": 32, "BK": 64}, warps=4)),),
    "delta_rule.verify.float32.long": ((UNBOUNDED, Config({"BV": 16, "BK": 32}, warps=4)),),
    "delta_rule.commit": ((UNBOUNDED, Config({"BV": 8, "BG": 4}, warps=1)),),
    "conv.verify": ((UNBOUNDED, Config({"BT": 4, "BC": 256}, warps=2)),),
    "conv.commit": ((UNBOUNDED, Config({"BC": 512}, warps=4)),),
}
"""For any device: sound everywhere, tuned nowhere."""
