"""The fake vendor's functions in this process, without its package and its device."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

import hal_npu
from hal_npu.symbols import SYMBOLS, Found, Status, Symbol

if TYPE_CHECKING:
    from hal_npu.provider import AscendProvider

FAKE = Path(__file__).parent / "fake"
"""The root of the fake packages: what a child process has on its path."""

Build = Callable[..., "AscendProvider"]
"""Makes a provider over the fake: layouts by state, and functions in place of the fake's."""

Edit = tuple[str, str, str]
"""A module of hal_npu, a text in it that occurs once, and what replaces it."""


@cache
def function(symbol: Symbol) -> Callable[..., Any]:
    """The fake's function of a symbol; its file is loaded under a name of its own."""
    path = FAKE.joinpath(*symbol.module.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"fake_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., Any] = getattr(module, symbol.name)
    return found


def called() -> dict[str, Symbol]:
    """The symbols that the adapter calls, by name."""
    return {symbol.name: symbol for symbol in SYMBOLS if symbol.operations}


def found(**replaced: Callable[..., Any]) -> dict[str, Found]:
    """Every called symbol as found, some with other functions."""
    return {
        name: Found(symbol, Status.BOUND, "", replaced.get(name) or function(symbol))
        for name, symbol in called().items()
    }


def build(layouts: Mapping[str, str] | None = None, **replaced: Callable[..., Any]) -> Any:
    """A provider over the fake, of whichever hal_npu is imported now."""
    provider: Any = importlib.import_module("hal_npu.provider")
    vendor: Any = importlib.import_module("hal_npu.vendor")
    bound = vendor.Vendor.of(found(**replaced))
    return provider.AscendProvider("npu", {"layouts": layouts or {}, "vendor": bound})


@contextlib.contextmanager
def edited(edits: Sequence[Edit], place: Path) -> Iterator[None]:
    """hal_npu with edits, imported from a copy while the context lasts."""
    package = place / "hal_npu"
    shutil.copytree(Path(hal_npu.__file__).parent, package)
    for module, old, new in edits:
        file = package / f"{module}.py"
        source = file.read_text()
        assert source.count(old) == 1, f"{module}.py has {source.count(old)} times: {old}"
        file.write_text(source.replace(old, new))
    kept = {
        name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "hal_npu"
    }
    sys.path.insert(0, str(place))
    try:
        yield
    finally:
        sys.path.remove(str(place))
        for name in [name for name in sys.modules if name.split(".")[0] == "hal_npu"]:
            del sys.modules[name]
        sys.modules.update(kept)


def _of(name: str) -> Callable[..., Any]:
    return function(next(symbol for symbol in SYMBOLS if symbol.name == name))


def conv_by_update(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, src: Tensor, windows: Tensor
) -> Tensor:
    """Decode as the vendor's default update does it, in the pool: what the adapter must not do."""
    rows = x[:, :, 0] if x.shape[2] == 1 else x
    update = _of("causal_conv1d_update_npu")
    result: Tensor = update(
        x=rows.float(), conv_state=state, weight=weight.float(), bias=bias, activation="silu",
        conv_state_indices=src,
    )  # fmt: skip
    windows[:, 0] = state[src.long()]
    return result.unsqueeze(2)


def kda_by_update(cells: Any, gate: Any, state: Tensor, src: Tensor, steps: int) -> Tensor:
    """Chains of channel gates by the one-token kernel: what the adapter must not do."""
    update = _of("fused_sigmoid_gating_delta_rule_update_npu")
    bounds = torch.arange(0, len(cells.q) + 1, steps)
    result: Tensor = update(
        A_log=gate.A_log, a=cells.a.float(), dt_bias=gate.dt_bias, softplus_beta=1.0,
        softplus_threshold=20.0, q=cells.q[None], k=cells.k[None], v=cells.v[None].float(),
        b=cells.b.float(), initial_state_source=state.transpose(-1, -2).contiguous(),
        initial_state_indices=src.long(), use_qk_l2norm_in_kernel=True, cu_seqlens=bounds,
        is_kda=True,
    )  # fmt: skip
    return result[0]


def move_by_step(
    dst: Tensor, src: Tensor, dst_indices: Tensor, src_indices: Tensor, step_indices: Tensor
) -> None:
    """Only a negative step skips; a negative slot is an address in front of the next."""
    indices = (dst_indices, src_indices, step_indices)
    for slot, row, step in zip(*(index.tolist() for index in indices), strict=True):
        if step >= 0:
            dst[:, slot] = src[:, row, step]


class Bounds:
    """One buffer a size for all calls, rewritten in place."""

    kept: ClassVar[dict[int, Tensor]] = {}

    @classmethod
    def of(cls, values: list[int]) -> Tensor:
        """The buffer with these values: the same object as at the last call."""
        buffer = cls.kept.setdefault(len(values), torch.zeros(len(values), dtype=torch.int64))
        return buffer.copy_(torch.tensor(values))


def on_cpu(device: str, options: Mapping[str, Any]) -> Any:
    """A provider over the fake for manifests of the device "cpu", where tensors can be."""
    return build(options["layouts"])
