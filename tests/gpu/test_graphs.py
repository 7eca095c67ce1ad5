"""A captured decode replays what eager calls give, at addresses that never move."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.model.spec import GateKind
from support import device_checks as checks

pytestmark = pytest.mark.cuda
BATCH, SLOTS, H, HV, K, V, W = 8, 20, 2, 4, 128, 128, 4
CHANNELS = 2 * H * K + HV * V
Step = Callable[[dict[str, Tensor], dict[str, Tensor], Tensor], Tensor]
"""A decode of inputs and indices on the pools, into `out`."""


@dataclass(frozen=True)
class Decode:
    """One operation with its inputs, pools and result, all of a fixed address."""

    step: Step
    args: dict[str, Tensor]
    pools: dict[str, Tensor]
    out: Tensor

    def fill(self, seed: int, live: int) -> None:
        """Random inputs and `live` rows of this step; the others are padding with garbage."""
        gen = torch.Generator().manual_seed(seed)
        for value in self.args.values():
            if value.is_floating_point():
                fresh = torch.randn(value.shape, generator=gen)
                fresh[live:] = float("nan")
                value.copy_(fresh)
        ids = torch.randperm(SLOTS, generator=gen)[:BATCH] + 1
        ids[live:] = -1
        self.args["src"].copy_(ids)
        self.args["dst"].copy_(ids)
        if live > 1:
            self.args["dst"][0] = SLOTS + 1
            self.args["src"][1] = -1
        self.args["start"].copy_(torch.randint(4, 99, (BATCH,), generator=gen))

    def run(self, pools: dict[str, Tensor], out: Tensor) -> Tensor:
        """One call on the given pools."""
        return self.step(self.args, pools, out)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=checks.DEVICE).to(dtype)


def indices() -> dict[str, Tensor]:
    """Index tensors of a step of padding."""
    none = torch.full((BATCH,), -1, device=checks.DEVICE, dtype=torch.int32)
    return {"src": none, "dst": none.clone(), "start": torch.zeros_like(none)}


def law() -> Gate:
    return Gate(GateKind.SCALAR, normal(HV, dtype=torch.float32), normal(HV, dtype=torch.float32))


def conv_decode() -> Decode:
    conv, weight = checks.provider().conv, normal(CHANNELS, W)
    ring, out = normal(SLOTS + 2, W, CHANNELS), normal(BATCH, CHANNELS)

    def step(args: dict[str, Tensor], pools: dict[str, Tensor], out: Tensor) -> Tensor:
        return conv.decode(args["x"], weight, None, pools["ring"], args["src"], args["dst"],
                           args["start"], activation="silu", out=out)  # fmt: skip

    return Decode(step, {"x": normal(BATCH, CHANNELS), **indices()}, {"ring": ring}, out)


def short_conv_decode() -> Decode:
    conv, weight = checks.provider().short_conv, normal(CHANNELS, W)
    ring, out = normal(SLOTS + 2, W, CHANNELS), normal(BATCH, CHANNELS)

    def step(args: dict[str, Tensor], pools: dict[str, Tensor], out: Tensor) -> Tensor:
        return conv.decode(args["B"], args["C"], args["x"], weight, None, pools["ring"],
                           args["src"], args["dst"], args["start"], out=out)  # fmt: skip

    args = {name: normal(BATCH, CHANNELS) for name in ("B", "C", "x")}
    return Decode(step, {**args, **indices()}, {"ring": ring}, out)


def delta_decode() -> Decode:
    rule, gate = checks.provider().delta_rule, law()
    state = normal(SLOTS + 2, HV, V, K, dtype=torch.float32)

    def step(args: dict[str, Tensor], pools: dict[str, Tensor], out: Tensor) -> Tensor:
        return rule.decode(args["q"], args["k"], args["v"], args["a"], args["b"], gate,
                           pools["state"], args["src"], args["dst"], out=out)  # fmt: skip

    heads = {"q": normal(BATCH, H, K), "k": normal(BATCH, H, K), "v": normal(BATCH, HV, V)}
    args = {**heads, "a": normal(BATCH, HV), "b": normal(BATCH, HV), **indices()}
    return Decode(step, args, {"state": state}, normal(BATCH, HV, V))


def fused_decode(norm: bool = False) -> Decode:
    rule, gate, weight = checks.provider().delta_rule, law(), normal(CHANNELS, W)
    pools = {
        "ring": normal(SLOTS + 2, W, CHANNELS),
        "state": normal(SLOTS + 2, HV, V, K, dtype=torch.float32),
    }
    scale = normal(V, dtype=torch.float32)

    def step(args: dict[str, Tensor], pools: dict[str, Tensor], out: Tensor) -> Tensor:
        extra = {"z": args["z"], "norm_weight": scale} if norm else {}
        return rule.decode_fused(
            args["x"], args["a"], args["b"], weight, None, "silu", gate, pools["ring"],
            pools["state"], args["src"], args["dst"], args["start"], out=out, **extra,
        )  # fmt: skip

    args = {"x": normal(BATCH, CHANNELS), "a": normal(BATCH, HV), "b": normal(BATCH, HV)}
    return Decode(step, {**args, "z": normal(BATCH, HV, V), **indices()}, pools,
                  normal(BATCH, HV, V))  # fmt: skip


def fused_decode_with_norm() -> Decode:
    return fused_decode(norm=True)


def captured(decode: Decode) -> torch.cuda.CUDAGraph:
    """The graph of one call, captured on a step of nothing but padding."""
    decode.run(decode.pools, decode.out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode.run(decode.pools, decode.out)
    return graph


@pytest.mark.parametrize(
    "make", [conv_decode, short_conv_decode, delta_decode, fused_decode, fused_decode_with_norm]
)
def test_replay_equals_eager_for_any_number_of_live_rows(make: Callable[[], Decode]) -> None:
    decode = make()
    graph = captured(decode)
    for seed, live in enumerate((BATCH, 3, 0, 1, BATCH - 1)):
        decode.fill(seed, live)
        eager = {name: pool.clone() for name, pool in decode.pools.items()}
        want = decode.run(eager, torch.full_like(decode.out, float("nan")))
        decode.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(decode.out, want)
        assert (decode.out[live:] == 0).all()
        assert not decode.out.isnan().any()
        for name, pool in decode.pools.items():
            assert torch.equal(pool, eager[name]), name


@pytest.mark.parametrize("make", [conv_decode, short_conv_decode, delta_decode, fused_decode])
def test_a_replay_of_padding_writes_nothing(make: Callable[[], Decode]) -> None:
    decode = make()
    before = {name: pool.clone() for name, pool in decode.pools.items()}
    graph = captured(decode)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(pool, before[name]) for name, pool in decode.pools.items())


def test_replays_allocate_nothing() -> None:
    decode = fused_decode_with_norm()
    graph = captured(decode)
    graph.replay()
    torch.cuda.synchronize()
    held = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == held
