"""What is tried for every name of a table: block sizes, warps, stages, what is kept in caches."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Final

from hal_triton.tuning import Config

EVICT: Final = ("", "evict_first")


def _each(
    name: str, sizes: Sequence[tuple[int, int]], evict: Sequence[str] = EVICT
) -> list[Config]:
    """One block of these (size, warps), with every way of evicting."""
    return [Config({name: n}, warps=w, evict=e) for (n, w), e in product(sizes, evict)]


_DECODE: Final = _each("BV", ((4, 1), (8, 1), (16, 1), (16, 2), (32, 1), (64, 2), (128, 4)))
_TILES: Final = [
    Config({"BT": tokens, "BG": group, "BC": channels}, warps=warps)
    for channels, warps in ((256, 1), (256, 2), (128, 1), (512, 2))
    for tokens, group in ((16, 4), (32, 4), (32, 8), (64, 2), (64, 4), (64, 8), (128, 4), (128, 8))
]
_COLUMNS: Final = _each("BC", ((512, 4), (512, 8), (1024, 4), (1024, 8)), ("",))
_CHUNKS: Final = [
    Config({"BT": tokens}, warps=warps)
    for tokens, warps in ((64, 4), (64, 8), (32, 2), (32, 4), (32, 8), (16, 1), (16, 2), (16, 4))
]
_WALK: Final = [
    Config({"BV": tile}, warps=warps, stages=stages)
    for (tile, warps), stages in product(
        ((16, 4), (16, 8), (32, 4), (32, 8), (64, 4), (64, 8), (128, 8)), (1, 2)
    )
]
_ROWS: Final = [Config({"BR": rows}, warps=warps) for rows in (4, 8, 16) for warps in (4, 8)]
_STEPS: Final = _each("BP", ((4, 1), (8, 1), (16, 1), (32, 2), (64, 4)))
_PLAIN_STEPS: Final = _each("BP", ((4, 1), (8, 1), (16, 1), (32, 2), (64, 4)), ("",))
_CHANNELS: Final = _each("BP", ((16, 1), (32, 1), (64, 1), (64, 2), (128, 2), (256, 4)), ("",))
_SCANS: Final = [
    Config({"BP": BP, "BT": BT, "BJ": BJ, "SEG": 0}, warps=warps, stages=stages)
    for BP, BT, BJ, warps, stages in (
        (16, 16, 16, 4, 1), (16, 16, 16, 8, 1), (16, 32, 32, 4, 1), (32, 32, 32, 4, 1),
        (32, 32, 32, 4, 2), (32, 64, 32, 4, 2), (64, 32, 32, 4, 1), (64, 32, 32, 4, 2),
        (64, 64, 32, 4, 2), (64, 64, 32, 4, 3), (64, 64, 64, 4, 1), (64, 64, 64, 4, 2),
        (64, 64, 64, 4, 3), (64, 64, 32, 8, 2), (64, 64, 64, 8, 2),
    )
]  # fmt: skip
_SEGMENTS: Final = [
    Config({**config.blocks, "SEG": tokens}, warps=config.warps, stages=config.stages)
    for config, tokens in product(_SCANS, (1024, 2048, 4096))
    if config.blocks["BT"] > 16
]
_VERIFY: Final = [
    Config({"BV": tile, "BK": keys}, warps=warps)
    for tile, keys, warps in (
        (16, 32, 4), (16, 128, 1), (32, 64, 1), (32, 128, 2), (32, 64, 2), (32, 64, 4),
        (64, 128, 4), (64, 64, 4), (128, 128, 8), (128, 64, 4),
    )
]  # fmt: skip
_COMMIT: Final = [
    Config({"BV": tile, "BG": group}, warps=warps, evict=evict)
    for (tile, group, warps), evict in product(
        ((8, 4, 1), (8, 8, 1), (16, 4, 1), (16, 8, 1), (16, 2, 2), (32, 4, 2)), EVICT
    )
]
_DRAFTED: Final = [
    Config({"BT": tokens, "BC": channels}, warps=warps)
    for tokens, (channels, warps) in product((2, 4, 8), ((256, 1), (256, 2), (512, 4)))
]
_WINDOWS: Final = _each("BC", ((256, 1), (512, 2), (512, 4), (1024, 8)), ("",))

CANDIDATES: Final[Mapping[str, Sequence[Config]]] = {
    "conv.prefill": _TILES,
    "conv.prefill.float32": _TILES,
    "conv.decode": _COLUMNS,
    "conv.verify": _DRAFTED,
    "conv.commit": _WINDOWS,
    "short_conv.prefill": _TILES,
    "short_conv.prefill.float32": _TILES,
    "short_conv.decode": _COLUMNS,
    "delta_rule.decode": _DECODE,
    "delta_rule.decode_fused": _DECODE,
    "delta_rule.decode_fused.norm": _DECODE,
    "delta_rule.decode_fused.channel": _DECODE,
    "delta_rule.recurrent": _each("BV", ((4, 1), (8, 1), (16, 1), (32, 1)), ("",)),
    **{f"delta_rule.chunks{kind}": _CHUNKS for kind in ("", ".float16", ".wide", ".float16.wide")},
    **{f"delta_rule.walk{kind}": _WALK for kind in ("", ".float16", ".wide", ".float16.wide")},
    "delta_rule.channel_chunks": _CHUNKS,
    "delta_rule.channel_walk": _WALK,
    "norm": _ROWS,
    **{f"delta_rule.verify{kind}": _VERIFY for kind in ("", ".long", ".cut", ".cut.long")},
    **{f"delta_rule.verify.float32{kind}": _VERIFY for kind in ("", ".long")},
    "delta_rule.drafts": [Config({}, warps=warps) for warps in (1, 2, 4)],
    "delta_rule.commit": _COMMIT,
    "scan.decode": _STEPS,
    "scan.decode.channel": _CHANNELS,
    "scan.recurrent": _CHANNELS,
    "scan.prepare": _ROWS,
    "scan.walk": [*_SCANS, *_SEGMENTS],
    **{f"scan.walk{kind}": _SCANS for kind in (".wide", ".float16", ".float16.wide")},
    **{f"scan.walk.float32{kind}": _SCANS for kind in ("", ".wide")},
    "scan.verify": _PLAIN_STEPS,
    "scan.verify.channel": _CHANNELS,
    "scan.commit": _STEPS,
    "scan.commit.channel": _CHANNELS,
}
"""Candidates by the name of a table; what is shipped for a device is always tried beside them."""
