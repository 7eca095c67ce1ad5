"""Wrong providers that are right in float32, at small sizes, or with one verify at a time."""

from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hal_cpu.provider import TorchProvider
from ops.mutations import Args, Mutation
from support.ops import Call


def half(args: Args) -> bool:
    """Whether the inputs are of 16 bits."""
    inputs: Tensor = args.get("x", args.get("v"))
    return inputs.dtype != torch.float32


def rows_of(args: Args) -> list[tuple[int, int]]:
    """First token of each row and the one behind its last."""
    bounds = args["query_start_loc"].tolist()
    return list(pairwise(bounds))


def shown(change: Callable[[Args], Args]) -> Mutation:
    """A mistake in what the operation is shown."""
    return lambda call: lambda **args: call(**{**args, **change(args)})


def left(change: Callable[[Args, Tensor], Any]) -> Mutation:
    """A mistake in the result, made in place."""

    def mutated(call: Call) -> Call:
        def wrong(**args: Any) -> Tensor:
            result = call(**args)
            change(args, result)
            return result

        return wrong

    return mutated


def channel_gates_of_half_forget(args: Args) -> Args:
    """Every other channel does not decay, in 16 bits alone."""
    if not half(args) or args["gate"] is None or args["a"].ndim != 3:
        return {}
    a = args["a"].clone()
    a[..., ::2] = -20
    return {"a": a}


def mamba1_of_half_drops_d(args: Args) -> Args:
    """The skip is left out by the kernel of one kind and dtype."""
    return {"D": None} if half(args) and args["x"].ndim == 2 else {}


def half_drops_tracks(args: Args) -> Args:
    """Track points are stored by the float32 kernel alone."""
    return {"track": None} if half(args) else {}


def second_layout_drops_tracks(args: Args) -> Args:
    """Track points are stored in one layout alone."""
    taps = args["weight"].shape[1] - 1
    by_time = args["state"].shape[1] == taps and args["state"].shape[2] != taps
    return {"track": None} if by_time else {}


def later_twins_start_from_zeros(args: Args) -> Args:
    """A slot is read by the first row that names it."""
    src, seen = args["src"].clone(), set[int]()
    for row, slot in enumerate(src.tolist()):
        if slot in seen:
            src[row] = -1
        seen.add(slot)
    return {"src": src}


def gates_saturate(args: Args) -> Args:
    """Softplus overflows where its argument is large."""
    gate, a = args["gate"], args["a"]
    if gate is None or gate.kind.value != "scalar":
        return {}
    return {"a": torch.where(a + gate.dt_bias > 12, torch.inf, a.float()).to(a.dtype)}


def dt_saturates(args: Args) -> Args:
    """Softplus is cut off where its argument is large."""
    return {"dt": None if args["dt"] is None else args["dt"].clamp(max=18.0)}


def rows_beyond_16_unwritten(args: Args) -> Args:
    """A launch covers sixteen rows."""
    dst = args["dst"].clone()
    dst[16:] = -1
    return {"dst": dst}


def channels_beyond_128_zero(args: Args, result: Tensor) -> None:
    """A launch covers 128 channels."""
    result[:, 128:] = 0


def heads_beyond_48_zero(args: Args, result: Tensor) -> None:
    """A launch covers 48 heads."""
    result[:, 48:] = 0


def late_tokens_of_long_rows(args: Args, result: Tensor) -> None:
    """A loop over chunks ends after 256 tokens."""
    for begin, end in rows_of(args):
        result[begin + 256 : end] = 0


def late_tokens_of_half(args: Args, result: Tensor) -> None:
    """In 16 bits the loop over chunks is not entered twice."""
    for begin, end in rows_of(args) if half(args) else ():
        result[begin + 63 : end] = 0


def widened(call: Call) -> Call:
    """A result that the operation allocates is left in float32."""

    def wrong(**args: Any) -> Tensor:
        result = call(**args)
        return result.float() if args.get("out") is None else result

    return wrong


def exact_grids(call: Call) -> Call:
    """`max_len` is taken for the length of the longest row."""

    def wrong(**args: Any) -> Tensor:
        lengths = args["query_start_loc"].diff()
        if len(lengths) and args["max_len"] != max(1, int(lengths.max())):
            raise RuntimeError("invalid launch")
        return call(**args)

    return wrong


def empty_pad_rows_refused(call: Call) -> Call:
    """A row without slots and tokens is not expected."""

    def wrong(**args: Any) -> Tensor:
        if bool(((args["query_start_loc"].diff() == 0) & (args["src"] < 0)).any()):
            raise RuntimeError("a row without anything")
        return call(**args)

    return wrong


def own_result(call: Call) -> Call:
    """`out` is not looked at."""
    return lambda **args: call(**{**args, "out": None})


def inputs_scaled_in_place(args: Args, result: Tensor) -> None:
    """The drafts are overwritten."""
    args.get("x", args.get("q")).mul_(0.5)


def nan_of_a_row_leaks(args: Args, result: Tensor) -> None:
    """A sum over the whole batch ends up in every row, times zero."""
    tokens = args.get("x", args.get("v"))
    result.add_(0 * tokens[: int(args["query_start_loc"][-1])].sum())


def another_order_each_run() -> Mutation:
    """A sum whose order changes from run to run."""
    runs = [0]

    def change(args: Args, result: Tensor) -> None:
        runs[0] += 1
        result.mul_(1 + runs[0] % 7 * 3e-7)

    return left(change)


def wrapped_at_32_bits(*names: str) -> Mutation:
    """Element offsets of slots are computed in 32 bits."""

    def change(args: Args) -> Args:
        size = args["state"][0].numel()
        return {
            name: torch.where(
                args[name] < 0, args[name], args[name].long() * size % 2**32 // size
            ).to(torch.int32)
            for name in names
        }

    return shown(change)


def copied_pool(args: Args) -> Args:
    """A strided pool is made contiguous, and the copy gets the writes."""
    return {"state": args["state"].contiguous()}


def rows_filled_up(*names: str) -> Mutation:
    """Slots that are missing are taken for none."""

    def change(args: Args) -> Args:
        rows = len(args["query_start_loc"]) - 1
        fill = {name: args[name].new_full((rows - len(args[name]),), -1) for name in names}
        return {name: torch.cat((args[name], more)) for name, more in fill.items()}

    return shown(change)


def scratch_used_up(call: Call) -> Call:
    """Commit clears what verify has left, and a second one finds nothing."""

    def wrong(**args: Any) -> None:
        call(**args)
        for tensor in args["scratch"]:
            tensor.zero_()

    return wrong


def ids_of_the_recording(call: Call) -> Call:
    """Slots are read once for each tensor, and kept by its address."""
    kept: dict[int, Tensor] = {}
    alive: list[Tensor] = []

    def wrong(**args: Any) -> Tensor:
        alive.append(args["src"])
        first = kept.setdefault(args["src"].data_ptr(), args["src"].clone())
        return call(**{**args, "src": first})

    return wrong


def in_itself(interface: str) -> type[TorchProvider]:
    """A provider that keeps the drafts in itself, and the scratch is only for show."""

    class Kept(TorchProvider):
        def __init__(self, device: str, options: Any) -> None:
            super().__init__(device, options)
            served, own = getattr(self, interface), list[list[Tensor]]()
            verify, commit = served.verify, served.commit

            @wraps(verify)
            def keeping(**args: Any) -> Any:
                own[:] = [[tensor.clone() for tensor in args["scratch"]]]
                return verify(**{**args, "scratch": own[0]})

            @wraps(commit)
            def kept(**args: Any) -> None:
                commit(**{**args, "scratch": own[0]})

            served.verify, served.commit = keeping, kept

    return Kept


def exact_scratch(interface: str) -> type[TorchProvider]:
    """A provider whose verify wants rows as wide as its scratch."""

    class Exact(TorchProvider):
        asked = 0

        def __init__(self, device: str, options: Any) -> None:
            super().__init__(device, options)
            served = getattr(self, interface)
            verify = served.verify

            @wraps(verify)
            def strict(**args: Any) -> Any:
                if len(args["src"]) and args["max_len"] != self.asked:
                    raise RuntimeError("the scratch is wider than the step")
                return verify(**args)

            served.verify = strict

        def scratch_spec(self, interface: str, shapes: Any, max_batch: int, width: int) -> Any:
            self.asked = width
            return super().scratch_spec(interface, shapes, max_batch, width)

    return Exact
