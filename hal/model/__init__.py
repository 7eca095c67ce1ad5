"""Hugging Face configs of every hybrid family, read into one ModelSpec; imports no torch."""

from hal.model.reader import UnknownFamily, read
from hal.model.source import ConfigLike
from hal.model.spec import (
    ATTENTION_KINDS,
    DTYPE_BYTES,
    STATEFUL_KINDS,
    AttentionSpec,
    CcaDims,
    DeltaDims,
    Dims,
    GateKind,
    Kind,
    LayerSpec,
    ModelSpec,
    ScanDims,
    ShortConvDims,
)

__all__ = [
    "ATTENTION_KINDS",
    "DTYPE_BYTES",
    "STATEFUL_KINDS",
    "AttentionSpec",
    "CcaDims",
    "ConfigLike",
    "DeltaDims",
    "Dims",
    "GateKind",
    "Kind",
    "LayerSpec",
    "ModelSpec",
    "ScanDims",
    "ShortConvDims",
    "UnknownFamily",
    "read",
]
