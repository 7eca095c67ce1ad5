"""Block sizes tuned for NVIDIA devices, by arch; what a table leaves out is the default's."""

from collections.abc import Mapping
from typing import Final

from hal_triton.tuning import DEFAULT, UNBOUNDED, Config, Table

_MMA: Final[Table] = {
    "delta_rule.chunks": ((UNBOUNDED, Config({"BT": 32}, warps=4)),),
    "delta_rule.chunks.wide": ((UNBOUNDED, Config({"BT": 32}, warps=8)),),
    "delta_rule.walk": (
        (64, Config({"BV": 16}, warps=4, stages=2)),
        (UNBOUNDED, Config({"BV": 32}, warps=4)),
    ),
}
"""For arches whose products take operands from registers: chunks of 64 would spill there."""

_HOPPER: Final[Table] = {
    "conv.prefill": ((UNBOUNDED, Config({"BT": 32, "BG": 8, "BC": 256}, warps=2)),),
    "short_conv.prefill": ((UNBOUNDED, Config({"BT": 32, "BG": 8, "BC": 256}, warps=2)),),
    "conv.decode": ((UNBOUNDED, Config({"BC": 512}, warps=4)),),
    "short_conv.decode": ((UNBOUNDED, Config({"BC": 512}, warps=4)),),
    "delta_rule.decode": (
        (2048, Config({"BV": 4}, warps=1, evict="evict_first")),
        (UNBOUNDED, Config({"BV": 16}, warps=1)),
    ),
    "delta_rule.decode_fused": (
        (64, Config({"BV": 4}, warps=1, evict="evict_first")),
        (512, Config({"BV": 32}, warps=1)),
        (UNBOUNDED, Config({"BV": 16}, warps=1, registers=128)),
    ),
    "delta_rule.decode_fused.channel": (
        (64, Config({"BV": 4}, warps=1, evict="evict_first")),
        (UNBOUNDED, Config({"BV": 32}, warps=1)),
    ),
    "delta_rule.decode_fused.norm": (
        (64, Config({"BV": 16}, warps=2, evict="evict_first")),
        (512, Config({"BV": 32}, warps=1)),
        (UNBOUNDED, Config({"BV": 16}, warps=1, registers=128)),
    ),
    "delta_rule.chunks": ((UNBOUNDED, Config({"BT": 64}, warps=4)),),
    "delta_rule.walk": (
        (64, Config({"BV": 16}, warps=4, stages=2)),
        (UNBOUNDED, Config({"BV": 64}, warps=4, stages=2)),
    ),
    "delta_rule.prefill.hopper": (
        (66, Config({"CONSUMERS": 1, "PREPARED": 1})),
        (UNBOUNDED, Config({"CONSUMERS": 2})),
    ),
    "delta_rule.channel_prefill.hopper": (
        (66, Config({"CONSUMERS": 1})),
        (UNBOUNDED, Config({"CONSUMERS": 2})),
    ),
    "delta_rule.channel_chunks": ((UNBOUNDED, Config({"BT": 32}, warps=2)),),
    "delta_rule.channel_walk": (
        (64, Config({"BV": 16}, warps=4, stages=2)),
        (UNBOUNDED, Config({"BV": 128}, warps=8)),
    ),
    "scan.decode": (
        (262144, Config({"BP": 4}, warps=1, evict="evict_first")),
        (UNBOUNDED, Config({"BP": 16}, warps=1)),
    ),
    "scan.walk": (
        (256, Config({"BP": 64, "BT": 32, "SEG": 2048}, warps=4, stages=2)),
        (UNBOUNDED, Config({"BP": 64, "BT": 32, "BJ": 32}, warps=4, stages=3)),
    ),
    "scan.walk.float32": ((UNBOUNDED, Config({"BP": 16, "BT": 16}, warps=4, stages=2)),),
    "scan.decode.channel": ((UNBOUNDED, Config({"BP": 32}, warps=1)),),
    "scan.recurrent": (
        (8192, Config({"BP": 16}, warps=1)),
        (UNBOUNDED, Config({"BP": 64}, warps=2)),
    ),
    "scan.verify": ((UNBOUNDED, Config({"BP": 8}, warps=1)),),
    "scan.commit": ((UNBOUNDED, Config({"BP": 4}, warps=1)),),
    "delta_rule.verify": (
        (64, Config({"BV": 64, "BK": 128}, warps=4)),
        (UNBOUNDED, Config({"BV": 64, "BK": 64}, warps=4)),
    ),
    "delta_rule.verify.long": ((UNBOUNDED, Config({"BV": 64, "BK": 128}, warps=4)),),
    "delta_rule.verify.cut": ((UNBOUNDED, Config({"BV": 64, "BK": 64}, warps=4)),),
    "delta_rule.commit": ((UNBOUNDED, Config({"BV": 8, "BG": 4}, warps=1)),),
    "conv.verify": ((UNBOUNDED, Config({"BT": 2, "BC": 256}, warps=1)),),
    "conv.commit": ((UNBOUNDED, Config({"BC": 512}, warps=2)),),
}
"""Swept on an H200 with Triton 3.6."""

TABLES: Final[Mapping[str, Table]] = {
    "sm_80": _MMA,
    "sm_86": _MMA,
    "sm_89": _MMA,
    "sm_90": _HOPPER,
    "sm_120": _MMA,
}
"""Tables by arch name."""


def table(arch: str) -> Table:
    """The table of an arch over the default one."""
    return {**DEFAULT, **TABLES.get(arch, {})}
