"""`read`: any form of a Hugging Face config -> one ModelSpec."""

from collections.abc import Callable, Mapping

from hal.errors import ConfigError
from hal.model.families import FAMILIES
from hal.model.fields import shown
from hal.model.source import ConfigLike, text_config
from hal.model.spec import ModelSpec

Extend = Callable[[Mapping[str, object]], ModelSpec | None]
"""Asked with the text config of a model_type that no family file knows."""


class UnknownFamily(ConfigError):
    """A config of a model_type that no family file and no extension knows."""

    def __init__(self, model_type: str) -> None:
        text = f"model_type {shown(model_type)} must be one of {', '.join(sorted(FAMILIES))}"
        super().__init__(text, "model_type")
        self.model_type = model_type


def read(config: ConfigLike, extend: Extend | None = None) -> ModelSpec:
    """Read a transformers config object, a mapping or the path of a config.json or its folder.

    The three forms of one model give equal specs. Nothing of the checkpoint is run: `auto_map` is
    ignored. Raises ConfigError, or UnknownFamily where `extend` does not know the model_type
    either. A model without any stateful layer is read like the others; refusing it is up to the
    caller.
    """
    data = text_config(config)
    model_type = data.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"model_type must be a string, found {shown(model_type)}", "model_type")
    family = FAMILIES.get(model_type)
    if family is not None:
        return family.read(data, model_type)
    spec = extend(data) if extend else None
    if spec is None:
        raise UnknownFamily(model_type)
    return spec
