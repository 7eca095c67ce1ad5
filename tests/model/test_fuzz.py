"""Whatever happens to a config, reading gives a spec or a ConfigError, and nothing else.

`make fuzz` takes 10^5 configs instead of 3,000.
"""

import copy
import json
import math
import os
import random
from collections.abc import Callable
from typing import Any

from hal.errors import ConfigError
from hal.model import ATTENTION_KINDS, ModelSpec, read
from hal.model.fields import MAX_LAYERS
from support.model_configs import EXPECTED, TINY, real, tiny

SOURCES = [tiny(name) for name in TINY] + [real(name) for name in EXPECTED]
ROUNDS = int(os.environ.get("HAL_FUZZ_CONFIGS", "3000"))

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 10**9, 10**400, -(10**400), 1 << 24, 1.5, 0.0, -2.0),
    *(math.inf, -math.inf, math.nan, "", "auto", "4", "full_attention", "\ud800", "M*", "x" * 500),
    *([], {}, [None], [[]], [0], [1, 2], ["conv"], ["a", 16], [True], [1.0], {"a": 1}, (), set()),
    *([0.0, math.inf], [math.nan, 1], {"__float__": "Infinity"}, {"__float__": "NaN"}, b"4"),
    *({"model_type": "lfm2"}, {"model_type": None}, object(), ["hybrid"] * 20_000, "M" * 20_000),
]
NAMES = sorted(
    {name for source in SOURCES for name in {**source, **source.get("text_config", {})}}
    | {"layers_block_type", "hybrid_layer_pattern", "attn_type_list", "ple_layer_ids", "use_kda"}
    | {"block_types", "local_layer_ids", "time_step_limit", "time_step_min", "mamba_ssm_dtype"}
    | {"kda_safe_gate", "kda_lower_bound", "linear_lower_bound", "full_attention_interval"}
    | {
        "cca",
        "num_query_groups",
        "mamba_d_ssm",
        "mamba_headdim",
        "dtype",
        "llm_config",
        "swa_layers",
    }
)

Mutation = Callable[[random.Random, dict[str, Any]], None]


def place(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """Choose the mapping to change: the config, or one nested in it."""
    nested = [value for value in config.values() if isinstance(value, dict)]
    return rng.choice([config, *nested, *nested])


def delete(rng: random.Random, config: dict[str, Any]) -> None:
    """Leave an entry out."""
    target = place(rng, config)
    if target:
        del target[rng.choice(sorted(target, key=str))]


def replace(rng: random.Random, config: dict[str, Any]) -> None:
    """Give an entry an odd value."""
    target = place(rng, config)
    if target:
        target[rng.choice(sorted(target, key=str))] = copy.deepcopy(rng.choice(ODD))


def add(rng: random.Random, config: dict[str, Any]) -> None:
    """Add an entry of some family."""
    place(rng, config)[rng.choice(NAMES)] = copy.deepcopy(rng.choice(ODD))


def swap(rng: random.Random, config: dict[str, Any]) -> None:
    """Exchange the values of two entries."""
    target = place(rng, config)
    if target:
        first, second = rng.choices(sorted(target, key=str), k=2)
        target[first], target[second] = target[second], target[first]


def graft(rng: random.Random, config: dict[str, Any]) -> None:
    """Take an entry of another model."""
    other = rng.choice(SOURCES)
    other = other.get("text_config", other)
    name = rng.choice(sorted(other))
    place(rng, config)[name] = copy.deepcopy(other[name])


def nest(rng: random.Random, config: dict[str, Any]) -> None:
    """Wrap the config in another."""
    inner = dict(config)
    config.clear()
    key = rng.choice(["text_config", "llm_config", "linear_attn_config"])
    config.update({"model_type": rng.choice(["qwen3_5", "lfm2_vl", "x", None]), key: inner})


def damage(rng: random.Random, config: dict[str, Any]) -> None:
    """Spoil one item of a list."""
    lists = [value for value in place(rng, config).values() if isinstance(value, list) and value]
    if lists:
        target = rng.choice(lists)
        target[rng.randrange(len(target))] = copy.deepcopy(rng.choice(ODD))


def scale(rng: random.Random, config: dict[str, Any]) -> None:
    """Move an integer a little or a lot."""
    target = place(rng, config)
    names = sorted(name for name, value in target.items() if type(value) is int)
    if names:
        name = rng.choice(names)
        target[name] = rng.choice([target[name] + 1, -target[name], target[name] * 10**6, 0])


MUTATIONS: list[Mutation] = [delete, replace, replace, add, swap, graft, nest, damage, scale]


def mutant(seed: int) -> dict[str, Any]:
    """Make one config with one to four changes; the seed decides all of them."""
    rng = random.Random(seed)
    config = copy.deepcopy(rng.choice(SOURCES))
    for _ in range(rng.randint(1, 4)):
        rng.choice(MUTATIONS)(rng, config)
    return config


def assert_sound(spec: ModelSpec) -> None:
    """Check what has to hold of any spec."""
    assert 1 <= len(spec.layers) <= MAX_LAYERS
    assert [layer.index for layer in spec.layers] == list(range(len(spec.layers)))
    assert spec.hidden_size > 0 and spec.vocab_size > 0
    for layer in {(layer.kinds, layer.dims, layer.attention) for layer in spec.layers}:
        kinds, dims, attention = layer
        assert kinds
        assert (attention is not None) == bool(ATTENTION_KINDS & set(kinds))
        for part in (dims, attention):
            for name in getattr(part, "__slots__", ()):
                value = getattr(part, name)
                assert not isinstance(value, int) or isinstance(value, bool) or value >= 0


def outcome(config: dict[str, Any]) -> ModelSpec | str:
    """Read a config; an error becomes its text."""
    try:
        return read(config)
    except ConfigError as error:
        return str(error)


def survive(seeds: range) -> tuple[int, int]:
    """Read the mutants of a range of seeds and count the specs and the errors."""
    specs = 0
    for seed in seeds:
        try:
            found = outcome(mutant(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        if isinstance(found, ModelSpec):
            assert_sound(found)
            specs += 1
        else:
            assert 0 < len(found) < 1000, seed
    return specs, len(seeds) - specs


def test_mutants_give_a_spec_or_a_config_error() -> None:
    specs, errors = survive(range(ROUNDS))
    assert specs > ROUNDS // 10
    assert errors > ROUNDS // 10


def test_a_mutant_reads_the_same_every_time() -> None:
    for seed in range(300):
        assert outcome(mutant(seed)) == outcome(mutant(seed))


def test_a_mutant_that_is_json_reads_the_same_from_json() -> None:
    for seed in range(600):
        config = mutant(seed)
        try:
            text = json.dumps(config)
        except (TypeError, ValueError):
            continue
        assert type(outcome(json.loads(text))) is type(outcome(config))
