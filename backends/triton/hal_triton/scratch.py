"""The tensors that verify leaves for commit, by interface and a layer's state shapes."""

from collections.abc import Mapping, Sequence

from hal.interfaces import Scratch

Shapes = Mapping[str, Sequence[int]]
Layouts = Mapping[str, str]


def scratch_of(
    interface: str, shapes: Shapes, layouts: Layouts, max_batch: int, width: int
) -> tuple[Scratch, ...]:
    """The scratch of `max_batch` rows of `width` tokens; none for an interface without verify."""
    tokens = max_batch * width
    if interface == "conv":
        return _conv(shapes, layouts, tokens)
    if interface == "delta_rule":
        return _delta_rule(shapes, layouts, tokens)
    return ()


def _conv(shapes: Shapes, layouts: Layouts, tokens: int) -> tuple[Scratch, ...]:
    """Inputs, in the state's dtype within the float32 that covers any, and parents."""
    return (
        Scratch("inputs", (tokens, _channels(shapes, layouts)), "float32"),
        Scratch("parents", (tokens,), "int32"),
    )


def _delta_rule(shapes: Shapes, layouts: Layouts, tokens: int) -> tuple[Scratch, ...]:
    """What a replay adds, by how much it decays, and which tokens lie on a path."""
    heads, first, second = shapes["recurrent"]
    V, K = (first, second) if layouts["recurrent"] == "VK" else (second, first)
    return (
        Scratch("keys", (tokens, _key_heads(shapes, layouts, heads, K, V), K), "float32"),
        Scratch("updates", (tokens, heads, V), "float32"),
        Scratch("decays", (tokens, heads, K), "float32"),
        Scratch("paths", (tokens, 2), "int32"),
    )


def _key_heads(shapes: Shapes, layouts: Layouts, heads: int, K: int, V: int) -> int:
    """Key heads by the channels of the layer's conv; without one each value head keeps its key."""
    if "conv" not in shapes:
        return heads
    wide = _channels(shapes, layouts) - heads * V
    found, rest = divmod(wide, 2 * K)
    return found if found > 0 and rest == 0 and heads % found == 0 else heads


def _channels(shapes: Shapes, layouts: Layouts) -> int:
    first, second = shapes["conv"]
    return first if layouts["conv"] == "CW" else second
