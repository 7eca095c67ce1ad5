"""From a model folder to a runner: the decision first, then the config, the weights last."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hal.errors import ConfigError, WeightsError
from hal.integrations.transformers.checkpoint import Checkpoint, inspect_folder
from hal.integrations.transformers.families import check_driven, check_verified, left_alone
from hal.integrations.transformers.runner import Runner
from hal.options import Options, Speculative
from hal.refusal import Unsupported
from hal.selection import Selection, choose

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

SHOWN: Final = 3
"""Names of tensors in a message, at most."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A model folder that was decided on and looked through; no weight is loaded yet."""

    checkpoint: Checkpoint
    selection: Selection
    config: PreTrainedConfig

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.selection.model.vocab_size

    @property
    def max_positions(self) -> int | None:
        """Positions that the model was made for, or None where its config sets no bound."""
        found = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) else None

    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a sequence, by generation_config.json, else by the config."""
        ids = _json(self.checkpoint.folder / "generation_config.json").get("eos_token_id")
        if ids is None:
            ids = getattr(self.config.get_text_config(), "eos_token_id", None)
        listed = ids if isinstance(ids, list | tuple) else [ids]
        return frozenset(token for token in listed if isinstance(token, int))


def open_folder(
    folder: Path,
    device: object,
    dtype: str | None = None,
    *,
    speculative: int | None = None,
    prefix_cache: bool = False,
    graphs: bool = False,
) -> Folder:
    """Decide whether the folder's model runs on the device, and find its weights.

    `speculative` is how many tokens a row verifies at once, its newest one included. With `graphs`
    a decode is recorded once for each size and then replayed.

    Raises `Unsupported` or `Undriven` where it does not, `ConfigError` or `WeightsError` where the
    folder is at fault. `dtype` None keeps the config's.
    """
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise ConfigError(f"{folder} {what}; give the folder of a Hugging Face model")
    model_type = _model_type(folder)
    drafts = None if speculative is None else Speculative(speculative)
    options = Options(
        dtype=dtype,
        speculative=drafts,
        prefix_cache=prefix_cache,
        graphs=graphs,
        ready_gates=True,
    )
    try:
        selection = choose(device, folder, options)
    except Unsupported as error:
        if note := left_alone(model_type):
            error.add_note(note)
        raise
    check_driven(model_type)
    if drafts is not None:
        check_verified(selection.model)
    return Folder(inspect_folder(folder), selection, _config(folder))


def load(folder: Folder, *, slots: int, max_batch: int, max_tokens: int, max_len: int) -> Runner:
    """Load the weights and bind them: `slots` sequences of at most `max_len` tokens each.

    A step takes at most `max_batch` rows and `max_tokens` tokens.
    """
    backend = folder.selection.backend(slots, max_batch, max_tokens)
    return Runner(load_weights(folder), backend, max_len)


def load_weights(folder: Folder) -> PreTrainedModel:
    """The model of transformers in the selection's dtype; `WeightsError` unless all of it fits."""
    try:
        loaded, info = _model_class(folder.config).from_pretrained(
            folder.checkpoint.folder,
            dtype=getattr(torch, folder.selection.dtype),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # so that the shapes can be named below
            output_loading_info=True,
        )
    except Exception as error:
        text = str(error).strip().partition("\n")[0] or type(error).__name__
        raise WeightsError(
            f"{folder.checkpoint.folder} cannot be loaded: {text}; download it again"
        ) from error
    check_loaded(folder.checkpoint.folder, info)
    model: PreTrainedModel = loaded
    return model


def check_loaded(folder: Path, info: Mapping[str, Iterable[object]]) -> None:
    """Refuse what transformers only warns of: tensors missing, left over or of another shape."""
    complaints = (
        ("holds other shapes than its config says for", map(_shapes, info["mismatched_keys"])),
        ("lacks", map(str, info["missing_keys"])),
        ("holds what its config has no place for,", map(str, info["unexpected_keys"])),
    )
    for what, found in complaints:
        names = sorted(found)
        if names:
            shown = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
            many = f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
            raise WeightsError(
                f"{folder} {what} {many}: {shown}; "
                f"its config.json and its weights must be of one model"
            )


def _shapes(entry: object) -> str:
    """A mismatched tensor with both its shapes."""
    if not isinstance(entry, tuple) or len(entry) != 3:
        return str(entry)
    key, found, needed = entry
    return f"{key} ({list(found)}, needed {list(needed)})"


def _model_type(folder: Path) -> str:
    """The model_type of the folder itself, which may be a wrapper's."""
    found = _json(folder / "config.json").get("model_type")
    if not isinstance(found, str):
        raise ConfigError(f"{folder / 'config.json'} names no model_type; download it again")
    return found


def _config(folder: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{folder / 'config.json'}: transformers refuses it: {text}; correct it"
        ) from error
    return config


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that a wrapper's config names, else the causal language model of the family."""
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if (
            isinstance(found, type)
            and issubclass(found, PreTrainedModel)
            and getattr(found, "config_class", None) is type(config)
        ):
            return found
    chosen: type[PreTrainedModel] = AutoModelForCausalLM
    return chosen


def _json(file: Path) -> Mapping[str, object]:
    """A file's JSON object, empty where there is no file."""
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}; download it again") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} holds no JSON object; download it again")
    return data
