"""Time the CPU provider's operations beside transformers' torch functions, in one interleaved run.

Both sides get the same float32 inputs, ready gates and a start state. hal also resolves slots and
checks its arguments; transformers is handed its dense state. Run with `OMP_NUM_THREADS=1`.
"""

import argparse
import inspect
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from hal_cpu.provider import TorchProvider

Run = Callable[[], object]
PROVIDER = TorchProvider("cpu", {})


@dataclass(frozen=True, slots=True)
class Result:
    """Median and least milliseconds of both sides, over interleaved repeats.

    They are times of the thread, so that other work on the machine counts less.
    """

    case: str
    hal_ms: float
    hal_min_ms: float
    transformers_ms: float
    transformers_min_ms: float

    @property
    def ratio(self) -> float:
        return self.transformers_ms / self.hal_ms


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plain(module: Any, name: str) -> Callable[..., Any]:
    return inspect.unwrap(getattr(module, name))


def delta(
    T: int, H: int, HV: int, K: int, V: int, B: int, *, channel: bool, chunk: int = 64
) -> tuple[Run, Run]:
    """A delta rule of B rows of T tokens: decode where T is 1; `chunk` is transformers'."""
    q, k, v = torch.randn(B * T, H, K), torch.randn(B * T, H, K), torch.randn(B * T, HV, V)
    g = -0.1 * torch.rand(B * T, HV, K) if channel else -0.1 * torch.rand(B * T, HV)
    beta, pool = torch.rand(B * T, HV), torch.randn(B + 2, HV, V, K)
    slots = i32(*range(B + 1, 1, -1))
    rule = PROVIDER.delta_rule
    bounds = i32(*range(0, B * T + 1, T))

    def ours() -> object:
        if T == 1:
            return rule.decode(q, k, v, g, beta, None, pool, slots, slots)
        return rule.prefill(q, k, v, g, beta, None, pool, slots, slots, bounds, T)

    way = ("recurrent" if T == 1 else "chunk", "_kimi_delta_attention" if channel else "")
    name = "".join(way) if channel else f"torch_{way[0]}_gated_delta_rule"
    function = plain(kimi if channel else qwen, name)
    batched = [t.view(B, T, *t.shape[1:]) for t in (q, k, v, g, beta)]
    options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    if T > 1:
        options["chunk_size"] = chunk
    start = torch.randn(B, HV, K, V)
    return ours, lambda: function(*batched, initial_state=start, **options)


def conv(T: int, C: int, B: int, W: int = 4) -> tuple[Run, Run]:
    """A convolution of B rows of T tokens with silu: decode where T is 1."""
    x, weight = torch.randn(B * T, C), torch.randn(C, W)
    ready, pool = PROVIDER.prepare({"conv_weight": weight})["conv_weight"], torch.randn(B + 2, C, 3)
    slots, bounds = i32(*range(B + 1, 1, -1)), i32(*range(0, B * T + 1, T))
    assert ready is not None

    def ours() -> object:
        args = (x, ready, None, pool, slots, slots, slots)
        if T == 1:
            return PROVIDER.conv.decode(*args, activation="silu")
        return PROVIDER.conv.prefill(*args, bounds, T, activation="silu")

    theirs = x.view(B, T, C).transpose(1, 2).contiguous()
    held = torch.randn(B, C, W)
    if T == 1:
        update = plain(qwen, "causal_conv1d_update")
        return ours, lambda: update(theirs, held, weight, None, "silu")
    function = plain(qwen, "causal_conv1d_fn")
    return ours, lambda: function(theirs, weight, None, "silu")


def ssd(T: int, H: int, P: int, N: int, G: int, B: int, chunk: int = 256) -> tuple[Run, Run]:
    """A Mamba-2 scan of B rows of T tokens: decode where T is 1; `chunk` is transformers'."""
    x, dt = torch.randn(B * T, H, P), torch.randn(B * T, H)
    A, D, bias = -1 - 15 * torch.rand(H), torch.randn(H), torch.randn(H) - 2
    keys, queries = torch.randn(B * T, G, N), torch.randn(B * T, G, N)
    pool, slots = torch.randn(B + 2, H, P, N), i32(*range(B + 1, 1, -1))
    bounds, inputs = i32(*range(0, B * T + 1, T)), (x, dt, A, keys, queries, D, bias, None)
    if T == 1:
        wide = [t.view(-1, H, 1).expand(-1, -1, P) for t in (dt, D, bias)]
        rate, held = A.view(H, 1, 1).expand(H, P, N), torch.randn(B, H, P, N)
        update = plain(bamba, "mamba2_selective_state_update")
        theirs = (held, x, wide[0], rate, keys, queries, wide[1][0], None, wide[2][0], True)
        return (
            lambda: PROVIDER.scan.decode(*inputs, pool, slots, slots),
            lambda: update(*theirs[:7], z=None, dt_bias=theirs[8], dt_softplus=True),
        )
    function = plain(bamba, "mamba2_chunk_scan")
    batched = [t.view(B, T, *t.shape[1:]) for t in (x, dt, keys, queries)]
    options: dict[str, Any] = {
        "chunk_size": chunk,
        "D": D,
        "dt_bias": bias,
        "dt_softplus": True,
        "initial_states": torch.randn(B, H, P, N),
        "return_final_states": True,
    }
    return (
        lambda: PROVIDER.scan.prefill(*inputs, pool, slots, slots, bounds, T),
        lambda: function(batched[0], batched[1], A, *batched[2:], **options),
    )


def mamba1(T: int, inner: int, N: int) -> tuple[Run, Run]:
    """A Mamba-1 scan of one row with z; transformers' starts from zeros, hal's from a slot."""
    x, dt, z = (torch.randn(T, inner) for _ in range(3))
    A, D, bias = -1 - 15 * torch.rand(inner, N), torch.randn(inner), torch.randn(inner) - 2
    B, C, pool = torch.randn(T, 1, N), torch.randn(T, 1, N), torch.randn(3, inner, N)
    function = plain(mamba, "mamba_selective_scan")
    theirs = [t.squeeze(1).T[None].contiguous() for t in (x, dt, B, C, z)]
    options = {"delta_bias": bias, "delta_softplus": True, "return_last_state": True}
    return (
        lambda: PROVIDER.scan.prefill(
            x, dt, A, B, C, D, bias, z, pool, i32(2), i32(1), i32(0, T), T
        ),
        lambda: function(theirs[0], theirs[1], A, *theirs[2:4], D, z=theirs[4], **options),
    )


def cases() -> Iterator[tuple[str, tuple[Run, Run]]]:
    yield "gdn decode B4 HV32 128x128", delta(1, 16, 32, 128, 128, 4, channel=False)
    yield "gdn decode B1 HV32 128x128", delta(1, 16, 32, 128, 128, 1, channel=False)
    yield "gdn decode B8 HV8 128x128", delta(1, 4, 8, 128, 128, 8, channel=False)
    yield "gdn decode B4 HV4 16x16", delta(1, 2, 4, 16, 16, 4, channel=False)
    yield "gdn prefill T512 H4 HV8 128x128", delta(512, 4, 8, 128, 128, 1, channel=False)
    yield "gdn prefill T512 H16 HV16 128x128", delta(512, 16, 16, 128, 128, 1, channel=False)
    yield "gdn prefill T100 H2 HV4 16x16", delta(100, 2, 4, 16, 16, 1, channel=False)
    yield "kda decode B4 H8 128x128", delta(1, 8, 8, 128, 128, 4, channel=True)
    yield "kda prefill T512 H8 128x128", delta(512, 8, 8, 128, 128, 1, channel=True)
    yield (
        "kda prefill T512 H8, hf chunk 16",
        delta(512, 8, 8, 128, 128, 1, channel=True, chunk=16),
    )
    yield "ssd prefill T512 H32 P64 N128 G1", ssd(512, 32, 64, 128, 1, 1)
    yield "ssd prefill T512 H32, hf chunk 64", ssd(512, 32, 64, 128, 1, 1, chunk=64)
    yield "ssd prefill T512 H32 G8", ssd(512, 32, 64, 128, 8, 1)
    yield "ssd decode B4 H32 P64 N128", ssd(1, 32, 64, 128, 1, 4)
    yield "mamba1 prefill T512 I2048 N16", mamba1(512, 2048, 16)
    yield "conv prefill T512 C2048", conv(512, 2048, 1)
    yield "conv decode B1 C2048", conv(1, 2048, 1)
    yield "conv decode B4 C8192", conv(1, 8192, 4)


def measure(name: str, sides: tuple[Run, Run], repeats: int) -> Result:
    times: tuple[list[float], list[float]] = ([], [])
    for side in sides:
        side()
    for _ in range(repeats):
        for kept, side in zip(times, sides, strict=True):
            begin = time.thread_time()
            side()
            kept.append(1e3 * (time.thread_time() - begin))
    ours, theirs = times
    return Result(name, median(ours), min(ours), median(theirs), min(theirs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="run the cases whose name holds this")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    torch.manual_seed(0)
    chosen = ((name, sides) for name, sides in cases() if args.only in name)
    with torch.no_grad():
        results = [measure(name, sides, args.repeats) for name, sides in chosen]
    if args.json:
        print(json.dumps([{**asdict(r), "ratio": r.ratio} for r in results], indent=2))
        return
    print(f"{'case':36} {'hal ms':>9} {'min':>9} {'hf ms':>9} {'min':>9} {'ratio':>7}")
    for r in results:
        ours, theirs = (r.hal_ms, r.hal_min_ms), (r.transformers_ms, r.transformers_min_ms)
        row = " ".join(f"{value:9.3f}" for value in (*ours, *theirs))
        print(f"{r.case:36} {row} {r.ratio:7.2f}")


if __name__ == "__main__":
    main()
