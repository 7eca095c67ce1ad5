"""The tensors that verify leaves for commit, by interface and a layer's state shapes.

Tokens come first, the parents last. Recurrent layers keep what a replay adds and by how much it
decays, which is far smaller than a state a token; Mamba-1 keeps its states, whose update is not
smaller.
"""

from collections.abc import Mapping, Sequence

from hal.interfaces import Scratch


def scratch_of(
    interface: str,
    shapes: Mapping[str, Sequence[int]],
    layouts: Mapping[str, str],
    max_batch: int,
    width: int,
) -> tuple[Scratch, ...]:
    """The scratch of `max_batch` rows of `width` tokens; none for an interface without verify."""
    named = _BY_INTERFACE.get(interface, _nothing)(shapes, layouts)
    if not named:
        return ()
    tokens = max_batch * width
    kept = [Scratch(name, (tokens, *shape), "float32") for name, shape in named.items()]
    return (*kept, Scratch("parents", (tokens,), "int32"))


_Shapes = Mapping[str, tuple[int, ...]]


def _conv(shapes: Mapping[str, Sequence[int]], layouts: Mapping[str, str]) -> _Shapes:
    first, second = shapes["conv"]
    return {"inputs": (first if layouts["conv"] == "CW" else second,)}


def _delta_rule(shapes: Mapping[str, Sequence[int]], layouts: Mapping[str, str]) -> _Shapes:
    heads, first, second = shapes["recurrent"]
    value_dim, key_dim = (first, second) if layouts["recurrent"] == "VK" else (second, first)
    keys = (heads, key_dim)
    return {"keys": keys, "updates": (heads, value_dim), "decays": keys}


def _scan(shapes: Mapping[str, Sequence[int]], layouts: Mapping[str, str]) -> _Shapes:
    shape = tuple(shapes["scan"])
    if len(shape) == 2:
        return {"states": shape}
    heads, value_dim, size = shape
    return {"keys": (heads, size), "updates": (heads, value_dim), "decays": (heads,)}


def _nothing(shapes: Mapping[str, Sequence[int]], layouts: Mapping[str, str]) -> _Shapes:
    return {}


_BY_INTERFACE = {"conv": _conv, "delta_rule": _delta_rule, "scan": _scan}
