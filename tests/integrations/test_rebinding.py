"""One instance runs its class's forward over other names; the class and its weights stay."""

import pytest
from torch import nn

from hal.errors import HalError
from hal.integrations.transformers.mixers import conv_weights, rebind, uses
from hal.integrations.transformers.seams import CONV, DELTA
from support.models import make_model


def test_uses_sees_through_decorators_and_names_no_more_than_there_is() -> None:
    mixer = next(m for m in make_model("qwen3_5_text").modules() if uses(m, frozenset({DELTA})))
    assert uses(mixer, frozenset({CONV, DELTA, "mamba2_chunk_scan"})) == {CONV, DELTA}
    assert uses(nn.Linear(1, 1), frozenset({CONV})) == set()


def test_rebinding_keeps_defaults_and_leaves_the_class_alone() -> None:
    class Mixer(nn.Module):
        def forward(self, x: int, y: int = 2, *, z: int = 3) -> tuple[object, ...]:
            return helper(x), y, z, self

    one, other = Mixer(), Mixer()
    rebind(one, {"helper": lambda x: -x})
    assert one.forward(1) == (-1, 2, 3, one)
    assert one(5, z=9) == (-5, 2, 9, one)
    assert other(1) == (10, 2, 3, other)


def helper(x: int) -> int:
    return 10 * x


def test_a_forward_that_is_no_function_cannot_be_bound() -> None:
    class Odd(nn.Module):
        forward = staticmethod(len).__func__

    with pytest.raises(HalError, match=r"Odd\.forward is no function"):
        rebind(Odd(), {})
    assert uses(Odd(), frozenset({CONV})) == set()


def test_conv_weights_are_those_of_a_depthwise_conv() -> None:
    holder = nn.Module()
    holder.conv = nn.Conv1d(6, 6, 3, groups=6)
    weight, bias = conv_weights(holder, "conv")
    assert weight.shape == (6, 3) and bias.shape == (6,)
    assert not weight.requires_grad and not bias.requires_grad
    holder.conv = nn.Linear(2, 2)
    with pytest.raises(HalError, match=r"Module\.conv is Linear, expected Conv1d"):
        conv_weights(holder, "conv")
