"""A model folder, looked at before anything is loaded: safetensors alone, whole and readable."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hal.errors import WeightsError

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
LENGTH_BYTES: Final = 8
"""A safetensors file starts with the size of its header in so many bytes, little-endian."""
MAX_HEADER: Final = 100 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with its weight files, which were found whole."""

    folder: Path
    files: tuple[Path, ...]
    bytes: int


def inspect_folder(folder: Path) -> Checkpoint:
    """Find the weight files and prove them whole by their headers, or raise `WeightsError`."""
    files = _files(folder)
    for file in files:
        _check(file)
    return Checkpoint(folder, files, sum(file.stat().st_size for file in files))


def _files(folder: Path) -> tuple[Path, ...]:
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    if (folder / INDEX).is_file():
        return _shards(folder)
    found = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if found:
        raise WeightsError(
            f"{folder} has pickled weights only ({found[0]}), and loading those can run code: "
            f"convert them to {SINGLE}"
        )
    raise WeightsError(f"{folder} has no weights: expected {SINGLE} or {INDEX}")


def _shards(folder: Path) -> tuple[Path, ...]:
    index = folder / INDEX
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is not an index of shards; download it again") from error
    if not names or any(not isinstance(n, str) or Path(n).name != n for n in names):
        raise WeightsError(f"{index} must name files of its own folder; download it again")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise WeightsError(
            f"{folder} lacks {len(missing)} of {len(names)} shards ({missing[0]}); "
            f"download the missing files"
        )
    return tuple(folder / name for name in names)


def _check(file: Path) -> None:
    """Hold a file's size against its header."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or not 0 < header <= min(MAX_HEADER, size - LENGTH_BYTES):
            raise WeightsError(
                f"{file} is not a safetensors file: a header of {header} bytes in {size}; "
                f"download it again"
            )
        needed = LENGTH_BYTES + header + _data_bytes(file, stream.read(header))
    if size != needed:
        raise WeightsError(
            f"{file} is corrupt: its header needs {needed} bytes, the file has {size}; "
            f"download it again"
        )


def _data_bytes(file: Path, header: bytes) -> int:
    try:
        entries = json.loads(header)
        ends = [e["data_offsets"][1] for name, e in entries.items() if name != "__metadata__"]
        return max((int(end) for end in ends), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise WeightsError(
            f"{file} is corrupt: its header cannot be read; download it again"
        ) from error
