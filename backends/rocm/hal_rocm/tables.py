"""Block sizes for AMD devices, by arch; what a table leaves out is the default's."""

from collections.abc import Mapping
from typing import Final

from hal_triton.tuning import DEFAULT, UNBOUNDED, Config, Table

_CDNA: Final[Table] = {
    "delta_rule.chunks": ((UNBOUNDED, Config({"BT": 32}, warps=4)),),
    "delta_rule.walk": (
        (64, Config({"BV": 16}, warps=4)),
        (UNBOUNDED, Config({"BV": 32}, warps=4)),
    ),
    "delta_rule.channel_chunks": ((UNBOUNDED, Config({"BT": 32}, warps=4)),),
    "delta_rule.channel_walk": ((UNBOUNDED, Config({"BV": 16}, warps=4)),),
    "scan.walk.float16.wide": ((UNBOUNDED, Config({"BP": 16, "BT": 16}, warps=4)),),
    "scan.walk.float32.wide": ((UNBOUNDED, Config({"BP": 16, "BT": 16}, warps=4)),),
}
"""One stage: nothing shows yet that a second one is worth the LDS that it takes."""

_RDNA: Final[Table] = {
    "delta_rule.decode_fused": ((UNBOUNDED, Config({"BV": 8}, warps=1)),),
    "delta_rule.decode_fused.channel": ((UNBOUNDED, Config({"BV": 8}, warps=1)),),
    "delta_rule.chunks": ((UNBOUNDED, Config({"BT": 16}, warps=4)),),
    "delta_rule.chunks.float16": ((UNBOUNDED, Config({"BT": 16}, warps=4)),),
    "delta_rule.walk": ((UNBOUNDED, Config({"BV": 16}, warps=4)),),
    "delta_rule.walk.float16": ((UNBOUNDED, Config({"BV": 16}, warps=8)),),
    "delta_rule.verify": ((UNBOUNDED, Config({"BV": 16, "BK": 32}, warps=4)),),
    "delta_rule.verify.long": ((UNBOUNDED, Config({"BV": 16, "BK": 32}, warps=4)),),
    "delta_rule.verify.float32": ((UNBOUNDED, Config({"BV": 16, "BK": 32}, warps=4)),),
    "delta_rule.verify.float32.long": ((UNBOUNDED, Config({"BV": 16, "BK": 16}, warps=4)),),
    "scan.decode": ((UNBOUNDED, Config({"BP": 8}, warps=1)),),
    "scan.walk": ((UNBOUNDED, Config({"BP": 16, "BT": 32}, warps=4)),),
    "scan.walk.wide": ((UNBOUNDED, Config({"BP": 16, "BT": 16}, warps=4)),),
    "scan.commit": ((UNBOUNDED, Config({"BP": 8}, warps=1)),),
}
"""Small tiles: a thread has 256 vector registers and no others."""

TABLES: Final[Mapping[str, Table]] = {
    "gfx90a": _CDNA,
    "gfx942": _CDNA,
    "gfx950": _CDNA,
    "gfx1100": _RDNA,
    "gfx1151": _RDNA,
    "gfx1201": _RDNA,
}
"""Tables by arch name."""


def table(arch: str) -> Table:
    """The table of an arch over the default one."""
    return {**DEFAULT, **TABLES.get(arch, {})}
