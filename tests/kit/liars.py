"""Wrong providers beyond the wrong operators of `ops.mutations`: the call's own mistakes."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hal.interfaces import ConvStep
from hal_cpu.conv_state import TorchConvState
from hal_cpu.provider import TorchProvider
from ops.mutations import Args, Mutation
from support.ops import Call


def then(change: Any) -> Mutation:
    """A mistake in what is left behind."""
    return lambda call: lambda **args: change(args, call(**args))


def first(change: Any) -> Mutation:
    """A mistake in what the operation is shown."""
    return lambda call: lambda **args: call(**{**args, **change(args)})


def empty_row_shifts_its_neighbours(args: Args) -> Args:
    """Rows without tokens are dropped from the bounds, but not from the slots."""
    lengths = args["query_start_loc"].diff().tolist()
    full = [n for n in lengths if n] + [0] * lengths.count(0)
    bounds = torch.tensor([0, *full]).cumsum(0)
    return {"query_start_loc": bounds.to(torch.int32)}


def lone_row_forgets_its_start(args: Args) -> Args:
    """The start state is dropped where the batch holds one row."""
    src = args["src"]
    return {"src": torch.full_like(src, -1) if len(src) == 1 else src}


def nan_leaks(args: Args, result: Tensor) -> Tensor:
    """A reduction over all tokens of the batch ends up in every row, times zero."""
    tokens = args.get("x", args.get("v"))
    live = tokens if "query_start_loc" not in args else tokens[: int(args["query_start_loc"][-1])]
    return result.add_(0 * live.sum()) if "query_start_loc" in args else result


def hidden_copy(call: Call) -> Call:
    """A pool with other strides is made contiguous, and the copy gets the writes."""
    return lambda **args: call(**{**args, "state": args["state"].contiguous()})


def wraps(bits: int, signed: bool) -> Mutation:
    """Element offsets are computed in so many bits."""

    def show(args: Args) -> Args:
        size = args["state"][0].numel()
        span = 2**bits

        def wrapped(ids: Tensor) -> Tensor:
            offsets = ids.long() * size
            low = offsets % span
            kept = torch.where(
                offsets >= (span // 2 if signed else span), low % (span // 2), offsets
            )
            return torch.where(ids < 0, ids, kept // size).to(torch.int32)

        return {"src": wrapped(args["src"]), "dst": wrapped(args["dst"])}

    return first(show)


def odd_head_dropped(args: Args, result: Tensor) -> Tensor:
    """Heads are worked on in pairs, and the last of an odd number is left."""
    if result.shape[1] % 2:
        result[:, -1] = 0
    return result


def out_ignored(call: Call) -> Call:
    """The result is always a tensor of its own."""
    return lambda **args: call(**{**args, "out": None})


def track_stores_the_end(call: Call) -> Call:
    """Every track point gets the state after the row's last token."""

    def wrong(**args: Any) -> Tensor:
        track = args.get("track")
        if track is not None:
            lengths = args["query_start_loc"].diff().tolist()
            points = [
                [row, lengths[row] if slot >= 0 else count, slot]
                for row, count, slot in track.tolist()
            ]
            args["track"] = torch.tensor(points, dtype=torch.int32)
        return call(**args)

    return wrong


def stateless_writes_the_last_slot(args: Args, result: Tensor) -> Tensor:
    """A negative dst is used as an index."""
    bounds = args.get("query_start_loc")
    lengths = [1] * len(args["src"]) if bounds is None else bounds.diff().tolist()
    for length, src, dst in zip(lengths, args["src"].tolist(), args["dst"].tolist(), strict=True):
        if length and src >= 0 and dst < 0:
            args["state"][dst] = args["state"][src]
    return result


def state_rounded(args: Args, result: Tensor) -> Tensor:
    """The state is kept in bfloat16 between calls."""
    for slot in args["dst"].tolist():
        if slot >= 0:
            args["state"][slot] = args["state"][slot].bfloat16().float()
    return result


def keys_normed_in_place(args: Args, result: Tensor) -> Tensor:
    """The caller's keys are overwritten."""
    args["k"].mul_(0.5)
    return result


def rows_taken_for_slots(args: Args) -> Args:
    """Row numbers are used as slot ids."""
    count = len(args["src"])
    rows = torch.arange(1, count + 1, dtype=torch.int32)
    return {name: torch.where(args[name] < 0, args[name], rows) for name in ("src", "dst")}


def gates_of_other_tokens(args: Args) -> Args:
    """Gates are not gathered with the rest where single-token rows run together."""
    return {"a": args["a"].flip(0), "b": args["b"].flip(0)}


def noisy() -> Mutation:
    """A sum whose order changes from run to run."""
    seen = [0]

    def change(args: Args, result: Tensor) -> Tensor:
        seen[0] += 1
        return result.mul_(1 + seen[0] * 1e-6)

    return then(change)


def rows_truncated(args: Args) -> Args:
    """The shorter of tokens and rows counts, and the rest is dropped without a word."""
    rows = min(len(args["src"]), len(args["dst"]))
    found = {name: args[name][:rows] for name in ("src", "dst", "start") if name in args}
    tokens = {n: args[n][:rows] for n in ("x", "q", "k", "v", "a", "b") if n in args}
    return {**found, **tokens, "out": None}


def pads_are_read(call: Call) -> Call:
    """A pad row's token is run like any other, so that its result is not zero."""

    def wrong(**args: Any) -> Tensor:
        result = call(**args)
        live = {**args, "src": torch.zeros_like(args["src"]), "out": None}
        live["state"] = torch.zeros_like(args["state"])
        ghost = call(**live)
        pads = (args["src"] < 0) & (args["dst"] < 0)
        result[pads] = ghost[pads]
        return result

    return wrong


def drifts(args: Args, result: Tensor) -> Tensor:
    """A little is lost in every call, too little to see in one."""
    for slot in args["dst"].tolist():
        if slot >= 0:
            args["state"][slot] *= 1 - 3e-6
    return result


def history_dropped(call: Call) -> Call:
    """A prefill of two or three tokens starts from zeros."""

    def wrong(**args: Any) -> Tensor:
        lengths = args["query_start_loc"].diff()
        short = (lengths == 2) | (lengths == 3)
        return call(**{**args, "src": torch.where(short, -1, args["src"]).to(torch.int32)})

    return wrong


def without(*names: str) -> Mutation:
    """Optional inputs are taken and not used."""
    return first(lambda args: dict.fromkeys(names))


def limit_dropped(args: Args) -> Args:
    """The limits of dt bind in prefill alone."""
    return {"dt_limit": (0.0, float("inf"))}


def groups_by_remainder(args: Args) -> Args:
    """Head h reads group h % G."""
    heads, groups = args["x"].shape[1], args["B"].shape[1]
    order = torch.arange(heads) % groups
    return {name: args[name][:, order] for name in ("B", "C")}


def dt_limited_late(args: Args) -> Args:
    """dt is rounded to bfloat16 before its bias."""
    return {"dt": None if args["dt"] is None else args["dt"].bfloat16().to(args["dt"].dtype)}


def verify_writes_the_committed_state(args: Args, result: Tensor) -> Tensor:
    """Verify leaves something in the slot that it read."""
    for slot in args["src"].tolist():
        if slot >= 0:
            args["state"][slot] *= 0.5
    return result


def parents_ignored(args: Args) -> Args:
    """A tree is verified as a chain."""
    return {"parents": None}


def commit_keeps_all(args: Args) -> Args:
    """Rejected tokens stay in the state."""
    lengths = args["query_start_loc"].diff()
    return {"last": torch.where(args["last"] >= 0, lengths - 1, args["last"]).to(torch.int32)}


def commit_counts_one_more(args: Args) -> Args:
    """`last` is taken for a count, and -1 writes the first token."""
    lengths = args["query_start_loc"].diff()
    return {"last": torch.minimum(args["last"] + 1, lengths - 1).to(torch.int32)}


def commit_into_the_source(args: Args) -> Args:
    """A first verify on a forked prefix commits into the cached slot."""
    return {"dst": torch.where(args["src"] >= 0, args["src"], args["dst"])}


def commit_nothing_of_one(args: Args) -> Args:
    """A row without drafts takes the plain path and is not committed."""
    lengths = args["query_start_loc"].diff()
    return {"last": torch.where(lengths == 1, -1, args["last"]).to(torch.int32)}


class CopyingSidecar(TorchConvState):
    """A sidecar that copies the indices for every layer."""

    def step(self, layer_id: int) -> ConvStep:
        step = super().step(layer_id)
        return replace(step, src=step.src.clone())


class SwappingSidecar(TorchConvState):
    """A sidecar that takes src for dst."""

    def step(self, layer_id: int) -> ConvStep:
        step = super().step(layer_id)
        return replace(step, src=step.dst, dst=step.src)


class DetachedSidecar(TorchConvState):
    """A sidecar that keeps copies of the pool's tensors."""

    def attach(self, tensors: Any) -> None:
        super().attach({layer: [t.clone() for t in held] for layer, held in tensors.items()})


class LayoutBlind(TorchProvider):
    """A provider that takes every layout for its first."""

    def __init__(self, device: str, options: Any) -> None:
        super().__init__(device, {})


class Renamed(TorchProvider):
    """A provider whose decode takes dst before src."""

    def __init__(self, device: str, options: Any) -> None:
        super().__init__(device, options)
        right = self.conv.decode

        def decode(
            x: Any, weight: Any, bias: Any, state: Any, dst: Any, src: Any, start: Any, *,
            activation: Any = None, out: Any = None,
        ) -> Any:  # fmt: skip
            return right(x, weight, bias, state, src, dst, start, activation=activation, out=out)

        self.conv.decode = decode  # type: ignore[method-assign]


class BiasLost(TorchProvider):
    """A provider that loses the bias where it lays weights out."""

    def prepare(self, params: Any) -> Any:
        return {**super().prepare(params), "conv_bias": None}


class Everything(tuple[Any, ...]):
    """A set that says yes to whatever is asked."""

    def __contains__(self, item: object) -> bool:
        return True
