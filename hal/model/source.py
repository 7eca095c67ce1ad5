"""From a config object, a mapping or a file to the mapping that describes the text model."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from hal.errors import ConfigError
from hal.model.fields import shown

MAX_BYTES: Final = 16 << 20
MAX_DEPTH: Final = 8

TEXT_KEYS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
DTYPES: Final = ("dtype", "torch_dtype")

WRAPPERS: Final = {
    **dict.fromkeys(("jev", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), "qwen3_5_text"),
    **dict.fromkeys(("nemo_speechlm", "nemotron_h_omni"), "nemotron_h"),
    **{"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"},
    **{"qwen4_exp": "qwen4_exp_text", "glm5_next": "glm5_next_text"},
    **{"inkling2": "inkling2_text", "inkling_mm_model": "inkling_text"},
    **{"lfm2_vl": "lfm2", "lfm3_vl": "lfm3"},
}
"""Wrapper model_type -> the text model_type meant where the nested config names none."""

FLAT: Final = "glm5_next"
"""The wrapper whose text-only exports keep the text entries at the top level."""


@runtime_checkable
class SupportsToDict(Protocol):
    """A config object, as transformers makes them."""

    def to_dict(self) -> Mapping[str, object]:
        """Return the entries of the config."""
        ...


ConfigLike = SupportsToDict | Mapping[str, object] | str | os.PathLike[str]
"""What `read` takes: a config object, its mapping, or the path of a config.json or its folder."""


def text_config(config: ConfigLike) -> Mapping[str, object]:
    """Return the entries of the text model, descending through wrappers."""
    data = _load(config) if isinstance(config, str | os.PathLike) else _mapping(config)
    for _ in range(MAX_DEPTH):
        inner = _inner(data)
        if inner is None:
            return data
        data = inner
    raise ConfigError(f"text configs are nested more than {MAX_DEPTH} deep", TEXT_KEYS[0])


def _mapping(config: object, name: str | None = None) -> Mapping[str, object]:
    try:
        found = _entries(config)
    except KeyboardInterrupt:
        raise
    except BaseException as cause:  # the object is the caller's, and may do anything
        text = f"{name or 'the config'} cannot be read: a {type(config).__name__} raised "
        raise ConfigError(f"{text}{type(cause).__name__}", name) from cause
    if not isinstance(found, dict):
        need = "a mapping" if name else "a config object, a mapping or the path of a config.json"
        raise ConfigError(f"{name or 'the config'} must be {need}, found {shown(found)}", name)
    return found


def _entries(config: object) -> object:
    """What the object holds; a mapping is copied, so that what it computes is computed here."""
    if isinstance(config, SupportsToDict) and not isinstance(config, type):
        config = config.to_dict()
    return dict(config) if isinstance(config, Mapping) else config


def _inner(data: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the nested text config, or None; it takes the wrapper's dtype if it has none."""
    outer = data.get("model_type")
    default = WRAPPERS.get(outer) if isinstance(outer, str) else None
    for key in TEXT_KEYS:
        if data.get(key) is None:
            continue
        inner = _mapping(data[key], key)
        named = default if inner.get("model_type") is None else inner["model_type"]
        if named is not None:
            owner = inner if any(inner.get(name) is not None for name in DTYPES) else data
            return {**inner, **{name: owner.get(name) for name in DTYPES}, "model_type": named}
    if default is not None and outer == FLAT:
        return {**data, "model_type": default}
    if default is not None:
        raise ConfigError(f"{outer}: text_config must be a mapping, found nothing", TEXT_KEYS[0])
    return None


def _load(path: str | os.PathLike[str]) -> Mapping[str, object]:
    """Read config.json, given by its own path or by that of its folder."""
    try:
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        if not file.is_file():
            raise ConfigError(f"{file} must be a config.json or its folder, found no such file")
        if (size := file.stat().st_size) > MAX_BYTES:
            raise ConfigError(f"{file} must be at most {MAX_BYTES} bytes, found {size}")
        data = json.loads(file.read_text(encoding="utf-8"))
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, RecursionError) as cause:
        raise ConfigError(f"{shown(str(path))} cannot be read as JSON: {cause}") from cause
    if not isinstance(data, Mapping):
        raise ConfigError(f"{file} must hold a JSON object, found {shown(data)}")
    return data
