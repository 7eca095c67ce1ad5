"""Memory and bandwidth of known accelerators, as their makers publish them, for planning."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator: memory in bytes, bandwidth in bytes a second."""

    name: str
    device: str
    memory: int
    bandwidth: int


def _card(name: str, device: str, gigabytes: int, gigabytes_a_second: int) -> Card:
    return Card(name, device, gigabytes * 10**9, gigabytes_a_second * 10**9)


CARDS: Final[Mapping[str, Card]] = {
    card.name: card
    for card in (
        _card("a100-40", "cuda", 40, 1555),
        _card("a100-80", "cuda", 80, 2039),
        _card("l40s", "cuda", 48, 864),
        _card("rtx4090", "cuda", 24, 1008),
        _card("rtx5090", "cuda", 32, 1792),
        _card("h100", "cuda", 80, 3350),
        _card("h200", "cuda", 141, 4800),
        _card("b200", "cuda", 180, 8000),
        _card("mi300x", "rocm", 192, 5300),
        _card("mi325x", "rocm", 256, 6000),
        _card("mi355x", "rocm", 288, 8000),
        _card("910b", "npu", 64, 1600),
        _card("910c", "npu", 128, 3200),
    )
}
"""Cards by name."""
