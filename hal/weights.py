"""Weight bytes from safetensors headers alone; no torch, and no tensor is read."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hal.errors import WeightsError

MAX_HEADER: Final = 100_000_000
"""What the format allows a header to have."""

INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of a checkpoint: all of them, those of routed experts, and an input embedding.

    `embedding` counts only where an output head is stored beside it: a decode step reads a row of
    it and no more.
    """

    total: int
    experts: int = 0
    embedding: int = 0


def weight_bytes(folder: str | os.PathLike[str]) -> WeightBytes | None:
    """The bytes of the safetensors files in a folder, None where there are none."""
    files = list(_files(Path(folder)))
    sizes: dict[str, int] = {}
    for file in files:
        sizes.update(_tensors(file))
    if not files:
        return None
    head = any("lm_head" in name for name in sizes)
    return WeightBytes(
        sum(sizes.values()),
        sum(size for name, size in sizes.items() if ".experts." in name),
        sum(size for name, size in sizes.items() if head and "embed_tokens" in name),
    )


def _files(folder: Path) -> Iterator[Path]:
    """The files that the index names, or all; another copy of the weights is not counted."""
    index = folder / INDEX
    if not index.is_file():
        yield from sorted(folder.glob("*.safetensors"))
        return
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        yield from (folder / name for name in names)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index}: expected a weight_map, got {error!r}") from error


def _tensors(file: Path) -> Iterator[tuple[str, int]]:
    """Names and bytes of the tensors of a file, from its header."""
    try:
        header = _header(file)
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                yield name, last - first
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{file}: expected a safetensors header, got {error!r}") from error


def _header(file: Path) -> Mapping[str, Mapping[str, list[int]]]:
    """The header: eight bytes of length, little-endian, then JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        room = file.stat().st_size - 8
        if not 0 < length <= min(room, MAX_HEADER):
            raise WeightsError(f"{file}: its header says {length} bytes, the file has {room}")
        header: Mapping[str, Mapping[str, list[int]]] = json.loads(stream.read(length))
        return header
