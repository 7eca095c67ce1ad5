"""Wrong providers that are right for first words, dense pools, fresh tensors or one layer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kit.subtle_liars import half, left, shown
from ops.mutations import Args, Mutation
from support.ops import Call


def lengths_of(args: Args) -> list[int]:
    """The tokens of each row."""
    bounds = args.get("query_start_loc")
    return [1] * len(args["src"]) if bounds is None else bounds.diff().tolist()


def second_layout(args: Args) -> bool:
    """Whether the state lies as "WC" or "KV"."""
    state = args["state"]
    if "weight" in args:
        channels, width = args["weight"].shape
        return bool(state.shape[1:] == (width - 1, channels))
    return "q" in args and bool(state.shape[2:] == (args["q"].shape[-1], args["v"].shape[-1]))


def copied_where(where: Callable[[Args], bool]) -> Mutation:
    """A pool is made contiguous in one case, and the copy gets the writes."""
    return shown(lambda args: {"state": args["state"].contiguous()} if where(args) else {})


def slots_apart(args: Args) -> bool:
    """Whether a slot is dense by itself, so that the pool is taken to be."""
    return bool(args["state"][0].is_contiguous())


def offset_ignored(args: Args) -> Args:
    """The pool is taken to begin where its memory does."""
    state = args["state"]
    return {"state": state.as_strided(state.shape, state.stride(), 0)}


def strided_results_of_half_ignored(args: Args) -> Args:
    """In 16 bits a result with gaps is made anew."""
    out = args.get("out")
    return {"out": None} if half(args) and out is not None and not out.is_contiguous() else {}


def tracks_wrap(args: Args) -> Args:
    """Offsets of track points are computed in 32 bits."""
    if args.get("track") is None:
        return {}
    track, size = args["track"].clone(), args["state"][0].numel()
    slots = track[:, 2].long()
    track[:, 2] = torch.where(slots < 0, slots, slots * size % 2**32 // size)
    return {"track": track}


def late_tracks_dropped(args: Args) -> Args:
    """Track points behind the second chunk are not stored."""
    if args.get("track") is None:
        return {}
    track = args["track"].clone()
    track[track[:, 1] > 80, 2] = -1
    return {"track": track}


def tracks_taken_in_order(args: Args) -> Args:
    """Track points end where the row number falls."""
    if args.get("track") is None:
        return {}
    falls = (args["track"].diff(dim=0)[:, 0] < 0).nonzero().flatten().tolist()
    return {"track": args["track"][: falls[0] + 1]} if falls else {}


def seven_taps(args: Args, result: Tensor) -> None:
    """The kernel of one width is wrong."""
    if args["weight"].shape[1] == 7:
        result.mul_(1.01)


def lone_row_of_half_forgets(args: Args) -> Args:
    """In 16 bits the start state of a lone row is dropped."""
    lone = half(args) and len(args["src"]) == 1
    return {"src": torch.full_like(args["src"], -1)} if lone else {}


def last_token_of_full_chunks(args: Args, result: Tensor) -> None:
    """The last token is lost where all tokens together fill chunks of 64."""
    if len(result) and len(result) % 64 == 0:
        result[-1] = 0


def rows_of_one_length_exchanged(args: Args) -> Args:
    """Rows of equal lengths go through a dense kernel that starts them in another order."""
    lengths = lengths_of(args)
    dense = len(lengths) > 1 and len(set(lengths)) == 1
    return {"src": args["src"].flip(0)} if dense else {}


def single_tokens_unwritten(args: Args) -> Args:
    """A batch of single tokens runs as a decode that is not told where to write."""
    lengths = lengths_of(args)
    return {"dst": torch.full_like(args["dst"], -1)} if lengths and max(lengths) == 1 else {}


def written(name: str) -> Mutation:
    """An input is counted on in place."""

    def change(args: Args, result: Tensor) -> None:
        if isinstance(args.get(name), Tensor):
            args[name].add_(1)

    return left(change)


def kept_by_shape(*names: str) -> Mutation:
    """What belongs to a layer is kept for all layers of its shape."""

    def mutated(call: Call) -> Call:
        kept: dict[Any, Any] = {}

        def wrong(**args: Any) -> Tensor:
            for name in names:
                value = args[name]
                key = name, getattr(value, "shape", None), getattr(value, "kind", None)
                args[name] = kept.setdefault(key, value)
            return call(**args)

        return wrong

    return mutated


def kept_by_address(name: str) -> Mutation:
    """An index is read once for each tensor."""

    def mutated(call: Call) -> Call:
        kept: dict[int, Tensor] = {}
        alive: list[Tensor] = []

        def wrong(**args: Any) -> Tensor:
            alive.append(args[name])
            first = kept.setdefault(args[name].data_ptr(), args[name].clone())
            return call(**{**args, name: first})

        return wrong

    return mutated


def result_reused(call: Call) -> Call:
    """Results of one shape share their memory."""
    kept: dict[Any, Tensor] = {}

    def wrong(**args: Any) -> Tensor:
        result = call(**args)
        if args.get("out") is not None:
            return result
        return kept.setdefault((result.shape, result.dtype), result).copy_(result)

    return wrong


def bound_of_five(args: Args) -> Args:
    """The lower bound of a safe gate is a constant of the kernel."""
    gate = args["gate"]
    return {"gate": replace(gate, lower_bound=-5.0)} if gate and gate.lower_bound else {}


def pads_alone_are_garbage(args: Args, result: Tensor) -> None:
    """A step without a live row leaves its result as it was allocated."""
    if bool(((args["src"] < 0) & (args["dst"] < 0)).all()):
        result.fill_(1)


def rows_and_no_token_refused(args: Args) -> Args:
    """A launch over no tokens fails."""
    if len(args["src"]) and not len(args.get("x", args.get("v"))):
        raise RuntimeError("invalid grid")
    return {}


def tokens_and_no_row_refused(args: Args) -> Args:
    """A launch over no rows fails."""
    if len(args.get("x", args.get("v"))) and not len(args["src"]):
        raise RuntimeError("invalid grid")
    return {}


def only_minus_one_is_none(name: str) -> Mutation:
    """Other negative ids are taken for slot 1."""
    return shown(lambda args: {name: torch.where(args[name] < -1, 1, args[name])})


def many_pads_unwritten(args: Args, result: Tensor) -> None:
    """Pads that no row's chunk reaches are left as they are."""
    result[int(args["query_start_loc"][-1]) + 16 :] = 1


def pads_folded_in(call: Call) -> Call:
    """The last row runs to the end of the tokens, and pads are cleared afterwards."""

    def wrong(**args: Any) -> Tensor:
        bounds = args["query_start_loc"].clone()
        end, bounds[-1] = int(bounds[-1]), len(args.get("x", args.get("v")))
        result = call(**{**args, "query_start_loc": bounds, "max_len": int(bounds.diff().max())})
        result[end:] = 0
        return result

    return wrong


def pad_rows_of_lightning_leak(args: Args, result: Tensor) -> None:
    """The decode of one kind ends in a sum over all rows, times zero, pad rows among them."""
    if args["dt"] is None:
        result.add_(0 * args["x"].sum())


def any_result(call: Call) -> Call:
    """A result of any dtype and shape is filled as far as it goes."""

    def wrong(**args: Any) -> Tensor:
        out = args.get("out")
        if out is None:
            return call(**args)
        result = call(**{**args, "out": None}).reshape(-1)
        out.view(-1)[: len(result)].copy_(result[: out.numel()])
        return out

    return wrong


def nan_of_a_state_leaks(call: Call) -> Call:
    """A sum over the states of the batch ends up in every row, times zero."""

    def wrong(**args: Any) -> Tensor:
        live = [slot for slot in args["src"].tolist() if slot >= 0]
        return call(**args).add_(0 * args["state"][live].float().sum())

    return wrong


def targets_filled_up(args: Args) -> Args:
    """Targets that are missing are taken for none."""
    missing = args["dst"].new_full((len(args["src"]) - len(args["dst"]),), -1)
    return {"dst": torch.cat((args["dst"], missing))}


def large_inputs_clamped(name: str) -> Mutation:
    """An intermediate of a narrow dtype saturates."""
    return shown(lambda args: {name: args[name].clamp(-50, 50)})


def steps_rounded(args: Args) -> Args:
    """Float32 steps are rounded to the dtype of x."""
    return {"dt": None if args["dt"] is None else args["dt"].to(args["x"].dtype)}


def dropped_in_half(**names: Any) -> Mutation:
    """An input is left out by the kernel of 16 bits."""
    return shown(lambda args: names if half(args) else {})


def softplus_of_half(call: Call) -> Call:
    """Steps that come ready are run through softplus by one kernel of 16 bits."""

    def wrong(**args: Any) -> Tensor:
        stepped = half(args) and args["x"].ndim == 3 and args["dt"] is not None
        return call(**{**args, "dt_softplus": stepped or args["dt_softplus"]})

    return wrong


def wrong_in_half(where: Callable[[Args], bool]) -> Mutation:
    """A kernel that is compiled for 16 bits and one size is wrong."""
    return left(lambda args, result: result.mul_(1.1) if half(args) and where(args) else result)


def version_read(args: Args) -> Args:
    """Inputs are told apart by their version counters, which inference tensors lack."""
    if args.get("x", args.get("v"))._version < 0:
        raise RuntimeError("a tensor without a version")
    return {}
