"""A model folder, looked at before anything is loaded: safetensors alone, whole and readable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hal.errors import WeightsError
from hal.weights import INDEX, SINGLE, tensor_bytes, weight_files

PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with its weight files, which were found whole."""

    folder: Path
    files: tuple[Path, ...]
    bytes: int


def inspect_folder(folder: Path) -> Checkpoint:
    """Find the weight files and prove them whole by their headers, or raise `WeightsError`."""
    files = weight_files(folder)
    if not files:
        raise WeightsError(_without_weights(folder))
    for file in files:
        tensor_bytes(file)
    return Checkpoint(folder, files, sum(file.stat().st_size for file in files))


def _without_weights(folder: Path) -> str:
    found = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if found:
        return (
            f"{folder} has pickled weights only ({found[0]}), and loading those can run code: "
            f"convert them to {SINGLE}"
        )
    return f"{folder} has no weights: expected {SINGLE} or {INDEX}"
