"""Layer words: the explicit lists, their legacy spellings, and the checks on both."""

from collections.abc import Container, Sequence
from typing import Final

from hal.model.fields import MAX_LAYERS, Fields

LINEAR: Final = "linear_attention"
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
INDEXED: Final = "indexed_attention"
HYBRID: Final = "hybrid"
HYBRID_SLIDING: Final = "hybrid_sliding"
CONV: Final = "conv"

LIST_NAMES: Final = ("layer_types", "layers_block_type")

LEGACY: Final = {
    "mamba": LINEAR,
    "recurrent": LINEAR,
    "attention": FULL,
    "deepseek_sparse_attention": INDEXED,
    "qwen_sparse_attention": INDEXED,
}
"""Words on disk that a transformers object holds under another name."""


def count(fields: Fields) -> int:
    """Return the number of layers, bounded before anything is expanded."""
    return fields.integer("num_hidden_layers", high=MAX_LAYERS)


def canonical(words: Sequence[str]) -> list[str]:
    """Return the words in the spelling that a transformers object uses."""
    return [LEGACY.get(word, word) for word in words]


def listed(fields: Fields) -> list[str] | None:
    """Return the explicit list of layer words, or None; both spellings must agree."""
    found = {name: words for name in LIST_NAMES if (words := fields.strings(name)) is not None}
    lists = [canonical(words) for words in found.values()]
    if len(lists) == 2 and lists[0] != lists[1]:
        raise fields.disagree(*LIST_NAMES, "two lists of layers that differ")
    return sized(fields, next(iter(found)), lists[0]) if lists else None


def sized(fields: Fields, name: str, words: list[str]) -> list[str]:
    """Return the words if they are as many as `num_hidden_layers`, which may be null or absent."""
    layers = fields.optional("num_hidden_layers", high=MAX_LAYERS)
    if len(words) != (layers or len(words)) or not words:
        need = f"one entry for each of {layers} layers (num_hidden_layers)"
        raise fields.error(name, need, f"{len(words)} entries")
    return words


def every(fields: Fields, interval: str) -> list[str]:
    """Return linear layers with full attention at each multiple of an interval, one-based."""
    period = fields.integer(interval)
    return [FULL if (i + 1) % period == 0 else LINEAR for i in range(count(fields))]


def placed(fields: Fields, full: Container[int], other: str = LINEAR) -> list[str]:
    """Return full attention at the zero-based indices `full` and `other` everywhere else."""
    return [FULL if i in full else other for i in range(count(fields))]
