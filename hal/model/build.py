"""A family as a table of functions, and the expansion into a ModelSpec that all families share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hal.model.fields import Fields, shown
from hal.model.layers import LIST_NAMES
from hal.model.spec import (
    ATTENTION_KINDS,
    STATEFUL_KINDS,
    AttentionSpec,
    Dims,
    Kind,
    LayerSpec,
    ModelSpec,
)


@dataclass(frozen=True, slots=True)
class Family:
    """How one model_type is read.

    `words` gives one layer word a layer and `holds` what such a layer holds. `dims` and `attend`
    are asked only where some layer needs them: a config of full attention alone may leave out
    every linear entry, and a pure SSM has no attention heads. `defaults` are what the family's
    config class takes for entries left out.
    """

    words: Callable[[Fields], list[str]]
    holds: Mapping[str, tuple[Kind, ...]]
    dims: Callable[[Fields], Dims] | None
    attend: Callable[[Fields, Kind], AttentionSpec]
    defaults: Mapping[str, object] = field(default_factory=dict)

    def read(self, data: Mapping[str, object], model_type: str) -> ModelSpec:
        """Expand the entries of a text config into a ModelSpec."""
        fields = Fields(data, model_type, self.defaults)
        words = self.words(fields)
        parts = {word: self._part(fields, word) for word in dict.fromkeys(words)}
        return ModelSpec(
            model_type=model_type,
            layers=tuple(LayerSpec(i, *parts[word]) for i, word in enumerate(words)),
            dtype=fields.dtype("dtype", "torch_dtype") or "float32",
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            state_dtype=fields.dtype("mamba_ssm_dtype", "mamba_ssm_cache_dtype"),
        )

    def _part(
        self, fields: Fields, word: str
    ) -> tuple[tuple[Kind, ...], Dims | None, AttentionSpec | None]:
        if word not in self.holds:
            name = fields.name(*LIST_NAMES, "block_types") or LIST_NAMES[0]
            raise fields.error(name, f"of the words {', '.join(self.holds)}", shown(word))
        kinds = self.holds[word]
        stateful = any(kind in STATEFUL_KINDS for kind in kinds)
        attention = next((kind for kind in kinds if kind in ATTENTION_KINDS), None)
        dims = self.dims(fields) if self.dims and stateful else None
        return kinds, dims, self.attend(fields, attention) if attention else None


def sizes(
    vocab: int, heads: int | None = None, kv: int | None = None, dim: int | None = None
) -> dict[str, object]:
    """Name the defaults that nearly every config class has."""
    return {
        "vocab_size": vocab,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
    }
