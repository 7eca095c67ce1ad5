"""What a provider gives is held against its contract: nothing is broadcast or cast unseen."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch

from hal.errors import ProviderError
from hal.runtime.batch import Batch, Mode
from hal_cpu.conv import TorchConv
from hal_cpu.delta_rule import TorchDeltaRule
from hal_cpu.scan import TorchScan
from support.bound import FAMILIES

SERVED: dict[str, tuple[type, ...]] = {
    "cca": (TorchConv,),
    "gated_delta_net": (TorchConv, TorchDeltaRule),
    "kimi_delta": (TorchConv, TorchDeltaRule),
    "mamba1": (TorchConv, TorchScan),
    "mamba2": (TorchConv, TorchScan),
    "short_conv": (TorchConv,),
}
SPOILED: dict[str, Callable[[torch.Tensor], object]] = {
    "one channel": lambda out: out[..., :1],
    "one row": lambda out: out[:1],
    "flat": lambda out: out.flatten(),
    "float64": lambda out: out.double(),
    "nothing": lambda out: None,
}
CASES = [(family, owner) for family, owners in SERVED.items() for owner in owners]


def spoil(monkeypatch: pytest.MonkeyPatch, owner: Any, verb: str, how: str) -> None:
    original = getattr(owner, verb)

    @wraps(original)
    def spoiled(*given: Any, **named: Any) -> Any:
        return SPOILED[how](original(*given, **named))

    monkeypatch.setattr(owner, verb, spoiled)


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize(("mode", "verb"), [(Mode.DECODE, "decode"), (Mode.EXTEND, "prefill")])
@pytest.mark.parametrize(("family", "owner"), CASES)
def test_a_result_that_the_contract_has_not_is_an_error(
    monkeypatch: pytest.MonkeyPatch, family: str, owner: type, mode: Mode, verb: str, how: str
) -> None:
    bound = FAMILIES[family]()
    given = bound.inputs(2)
    bound.backend.begin(Batch(mode, [1, 1], [0, 0], [-1, -1], [1, 2]))
    spoil(monkeypatch, owner, verb, how)
    with pytest.raises(ProviderError):
        bound.call(given)
