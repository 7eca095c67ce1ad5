"""Configs on disk, and the state shapes that follow from a layer's dims."""

import json
from pathlib import Path
from typing import Any

from hal.model import CcaDims, DeltaDims, Dims, Kind, LayerSpec, ScanDims, ShortConvDims

CONFIGS = Path(__file__).parents[1] / "data" / "configs"

TINY = sorted(path.stem for path in (CONFIGS / "tiny").glob("*.json"))
MEASURED: dict[str, Any] = json.loads((CONFIGS / "tiny_measured_states.json").read_text())
EXPECTED: dict[str, Any] = {
    name: facts
    for name, facts in json.loads((CONFIGS / "real" / "expected.json").read_text()).items()
    if not name.startswith("_")
}


def tiny(name: str, **changes: Any) -> dict[str, Any]:
    """Return a tiny config, changed inside its text config where it is a wrapper."""
    config: dict[str, Any] = json.loads((CONFIGS / "tiny" / f"{name}.json").read_text())
    config.get("text_config", config).update(changes)
    return config


def real(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config of a public model, changed inside its text config likewise."""
    config: dict[str, Any] = json.loads((CONFIGS / "real" / name).read_text())
    config.get("text_config", config).update(changes)
    return config


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the config with some entries left out."""
    return {name: value for name, value in config.items() if name not in names}


def conv_state(dims: Dims) -> tuple[int, int] | None:
    """Return the channels of the convolution and the inputs that it carries."""
    match dims:
        case DeltaDims():
            return 2 * dims.H * dims.K + dims.HV * dims.V, dims.W - 1
        case ScanDims(W=0):
            return None
        case ScanDims(dt_rank=None):
            return dims.H * dims.P + 2 * dims.G * dims.N, dims.W - 1
        case ScanDims():
            return dims.H * dims.P, dims.W - 1
        case ShortConvDims():
            return dims.hidden, dims.W - 1
        case CcaDims():
            return (dims.HQ + dims.HKV) * dims.D, dims.time0 + dims.time1 - 2


def recurrent_state(dims: Dims) -> tuple[int, ...] | None:
    """Return the recurrent shape in the axis order of transformers."""
    match dims:
        case DeltaDims():
            return dims.HV, dims.K, dims.V
        case ScanDims(H=1, dt_rank=int()):
            return dims.P, dims.N
        case ScanDims():
            return dims.H, dims.P, dims.N
    return None


def kinds_of(layers: tuple[LayerSpec, ...], *wanted: Kind) -> list[int]:
    """Return the indices of the layers that hold one of the kinds."""
    return [layer.index for layer in layers if set(wanted) & set(layer.kinds)]
