"""Weight bytes from safetensors headers alone; no torch, and no tensor is read."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hal.errors import WeightsError
from hal.model.fields import whole

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

LENGTH_BYTES: Final = 8
"""A safetensors file starts with the size of its header in so many bytes, little-endian."""
MAX_HEADER: Final = 100_000_000
"""What the format allows a header to have."""
MAX_FILE: Final = 1 << 63


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
    """The bytes of the checkpoint in a folder, None where there is none."""
    files = weight_files(Path(folder))
    if not files:
        return None
    sizes: dict[str, int] = {}
    for file in files:
        sizes.update(tensor_bytes(file))
    head = any("lm_head" in name for name in sizes)
    return WeightBytes(
        sum(sizes.values()),
        sum(size for name, size in sizes.items() if ".experts." in name),
        sum(size for name, size in sizes.items() if head and "embed_tokens" in name),
    )


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that a checkpoint is loaded from; none where it has none.

    The single file goes before an index, as transformers has it. Other files are not counted: they
    are another copy, or an adapter.
    """
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    return _shards(folder) if (folder / INDEX).is_file() else ()


def _shards(folder: Path) -> tuple[Path, ...]:
    """The files that the index names, all of its own folder."""
    index = folder / INDEX
    try:
        names = set(_json(index.read_bytes())["weight_map"].values())
    except (OSError, *_UNREADABLE) as error:
        raise WeightsError(f"{index} is not an index of shards; download it again") from error
    if not names or any(not isinstance(n, str) or Path(n).name != n for n in names):
        raise WeightsError(f"{index} must name files of its own folder; download it again")
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise WeightsError(
            f"{folder} lacks {len(missing)} of {len(names)} shards ({missing[0]}); "
            f"download the missing files"
        )
    return tuple(folder / name for name in sorted(names))


def tensor_bytes(file: Path) -> dict[str, int]:
    """Names and bytes of a file's tensors, from its header; the file is proved to be whole."""
    try:
        size, length, header = _header(file)
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error}") from error
    if header is None:
        raise WeightsError(
            f"{file} is not a safetensors file: a header of {length} bytes in {size}; "
            f"download it again"
        )
    spans = _spans(file, header)
    needed = LENGTH_BYTES + length + max((last for _, last in spans.values()), default=0)
    if size != needed:
        raise WeightsError(
            f"{file} is corrupt: its header needs {needed} bytes, the file has {size}; "
            f"download it again"
        )
    return {name: last - first for name, (first, last) in spans.items()}


def _header(file: Path) -> tuple[int, int, bytes | None]:
    """The file's size, its header's length and, where that can be true, the header."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        there = 0 < length <= min(MAX_HEADER, size - LENGTH_BYTES)
        return size, length, stream.read(length) if there else None


def _spans(file: Path, header: bytes) -> dict[str, tuple[int, int]]:
    """The first byte and the one after the last, by tensor."""
    try:
        spans = {
            name: _span(*entry["data_offsets"])
            for name, entry in _json(header).items()
            if name != "__metadata__"
        }
    except _UNREADABLE as error:
        text = f"{file} is corrupt: its header cannot be read; download it again"
        raise WeightsError(text) from error
    return spans


def _span(first: object, last: object) -> tuple[int, int]:
    if not (whole(first, 0, MAX_FILE) and whole(last, first, MAX_FILE)):
        raise ValueError("expected two offsets in bytes, the first not after the last")
    return first, last


def _json(text: bytes) -> Any:
    return json.loads(text)


_UNREADABLE: Final = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What JSON of any other form gives: no such entry, another type, or too deep."""
