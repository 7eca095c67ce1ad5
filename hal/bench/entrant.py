"""One implementation on one shape: a call that is ready to run, and its results in `hal`'s form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from hal.interfaces import Gate, Provider
from hal.model.spec import GateKind
from hal.reference.conv import read_window, write_window
from hal.testing.case import Case, Pools
from hal.testing.plan import Trial
from hal.testing.rows import clone_view
from hal.testing.subject import prepared
from hal.testing.verify_cases import STATES
from hal_registry import interface_of

Run = Callable[[], object]


class NotComparable(Exception):
    """A peer that cannot do what a shape asks for; the text says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gave: its result `[T, ...]`, and the pools after it, None where it gives none."""

    result: Tensor
    pools: Pools | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """A call on tensors of its own; `read` turns what the first run gave into an outcome.

    Nothing but `run` is timed, so what a peer needs laid out otherwise is laid out before. `kind`
    names the limits it is held to where it rounds more than the operation does, "" where not.
    """

    run: Run
    read: Callable[[Any], Outcome]
    kind: str = ""

    def outcome(self) -> Outcome:
        """Run once and read."""
        return self.read(self.run())


Make = Callable[[Trial, Case, torch.device], Attempt]
"""Makes an attempt at a case on a device."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """Who is timed: a name and a version for the table, and how attempts are made.

    `equal` says that it takes rows of one length alone, so that it is checked on such rows.
    """

    name: str
    version: str
    make: Make
    equal: bool = False


CHANNELS: Final = (GateKind.CHANNEL, GateKind.SAFE)
"""Gates of every channel, for peers that compute one with or without a bound."""


def moved(value: Any, place: torch.device) -> Any:
    """A copy of an argument on the device, whose strides it keeps."""
    if isinstance(value, Tensor):
        return clone_view(value).to(place)
    if is_dataclass(value) and not isinstance(value, type):
        there = {f.name: moved(getattr(value, f.name), place) for f in fields(value)}
        return replace(value, **there)
    return value


def moved_args(case: Case, place: torch.device) -> dict[str, Any]:
    """The arguments of a case on the device, none of them shared with the case."""
    return {name: moved(value, place) for name, value in case.args.items()}


def of_provider(name: str, version: str, provider: Provider) -> Entrant:
    """A provider as an entrant."""
    return Entrant(name, version, partial(_provided, provider))


def _provided(provider: Provider, trial: Trial, case: Case, place: torch.device) -> Attempt:
    return bound(provider, trial, case, moved_args(case, place))


def bound(provider: Provider, trial: Trial, case: Case, given: Mapping[str, Any]) -> Attempt:
    """A provider's attempt on arguments that are there already, which it may change."""
    args = prepared(provider, dict(given))
    interface, _, verb = trial.operation.partition(".")
    served = getattr(provider, interface)
    if verb == "verify":
        run: Run = _verified(provider, trial, case, args, served)
    else:
        run = partial(getattr(served, verb), **args, **case.options)
    return Attempt(run, lambda result: Outcome(result, {n: args[n] for n in case.pools}))


def _verified(
    provider: Provider, trial: Trial, case: Case, args: dict[str, Any], served: Any
) -> Run:
    """Verify, then commit of every draft: what a step of speculation costs a layer."""
    interface, state, dst = interface_of(trial.operation), args["state"], args["dst"]
    shapes = {STATES[interface]: tuple(state.shape[1:])}
    asked = provider.scratch_spec(interface, shapes, len(dst), args["max_len"])
    scratch = [torch.zeros(s.shape, dtype=getattr(torch, s.dtype)).to(dst.device) for s in asked]
    own = {name: args[name] for name in ("src", "start", "query_start_loc") if name in args}
    last = (args["query_start_loc"].diff() - 1).to(torch.int32)
    given = {name: value for name, value in args.items() if name != "dst"}
    verify = partial(served.verify, **given, **case.options, scratch=scratch)
    commit = partial(served.commit, **own, state=state, dst=dst, scratch=scratch, last=last)

    def step() -> object:
        result = verify()
        commit()
        return result

    return step


def starting(case: Case) -> Tensor | None:
    """The states that the rows start from, None where all start from nothing.

    Conv windows are `[B, C, W-1]`, oldest first, delta-rule states `[B, HV, V, K]`.
    """
    if max(case.rows.src) < 0:
        return None
    if min(case.rows.src) < 0:
        raise NotComparable("some rows start from nothing and some from a state")
    pool = case.args["state"]
    if case.width:
        starts = zip(case.rows.src, case.rows.start, strict=True)
        windows = [read_window(pool, s, p, case.width, case.layout).T for s, p in starts]
        return torch.stack(windows)
    return _as_vk(pool[list(case.rows.src)], case.layout)


def slotted(case: Case, place: torch.device) -> tuple[Tensor, Tensor]:
    """A pool whose slots 1..B hold what the rows start from, and these slots, on the device.

    For peers with slots of their own; slot 0 stays empty, as no engine hands it out.
    """
    states = starting(case)
    if states is None:
        raise NotComparable("its rows continue from states")
    pool = torch.cat((torch.zeros_like(states[:1]), states)).to(place)
    return pool, torch.arange(1, len(states) + 1, dtype=torch.int32, device=place)


def windowed(case: Case, place: torch.device) -> Tensor:
    """The windows beside `slotted`, `[1 + B, C, W-1]`, of a decode that is fused with its conv."""
    pool, layout = case.args["conv_state"], case.layouts["conv_state"]
    width = case.args["conv_weight"].shape[1]
    starts = zip(case.rows.src, case.rows.start, strict=True)
    held = torch.stack([read_window(pool, s, p, width, layout).T for s, p in starts])
    return torch.cat((torch.zeros_like(held[:1]), held)).to(place)


def raw_gate(case: Case, place: torch.device, *kinds: GateKind) -> Gate:
    """The layer's gate on the device, for peers that compute one of these kinds inside."""
    gate: Gate | None = case.args["gate"]
    if gate is None or gate.kind not in kinds:
        raise NotComparable(f"it takes raw gates of kind {' or '.join(kinds)} here")
    moved_gate: Gate = moved(gate, place)
    return moved_gate


def bound_of(gate: Gate) -> dict[str, float]:
    """The bound of a safe gate by the name that peers share, and nothing for another gate."""
    return {} if gate.lower_bound is None else {"lower_bound": gate.lower_bound}


def ready_gates(case: Case, place: torch.device) -> tuple[Tensor, Tensor]:
    """Log decay and beta in float32, for peers that take scalar gates made beforehand."""
    law = raw_gate(case, torch.device("cpu"), GateKind.SCALAR)
    a, b = case.args["a"].double(), case.args["b"].double()
    decay = -law.A_log.double().exp() * torch.nn.functional.softplus(a + law.dt_bias.double())
    return decay.float().to(place), b.sigmoid().float().to(place)


def pools_with(case: Case, states: Tensor) -> Pools:
    """The case's pools after a call that left these states, in the form of `starting`."""
    pool = clone_view(case.args["state"])
    there = states.detach().cpu().to(pool.dtype)
    ends = zip(case.rows.dst, case.rows.start, case.rows.lengths, there, strict=True)
    for slot, start, count, state in ends:
        if case.width:
            write_window(pool, slot, start + count, state.T, case.layout)
        else:
            pool[slot] = _as_vk(state, case.layout)
    return {case.pools[0]: pool}


def fused_pools_with(case: Case, states: Tensor, windows: Tensor) -> Pools:
    """The pools after a fused decode that left these states and windows `[B, C, W-1]`."""
    pool, layout = clone_view(case.args["conv_state"]), case.layouts["conv_state"]
    there = windows.detach().cpu().to(pool.dtype)
    for slot, start, window in zip(case.rows.dst, case.rows.start, there, strict=True):
        write_window(pool, slot, start + 1, window.T, layout)
    return {**pools_with(case, states), "conv_state": pool}


def _as_vk(states: Tensor, layout: str) -> Tensor:
    """From a layout to "VK" or back; only "KV" differs."""
    return states.transpose(-1, -2) if layout == "KV" else states


def rows_of(case: Case) -> tuple[int, int]:
    """How many rows and how long, for peers that take batches of equal rows alone."""
    lengths = set(case.rows.lengths)
    if len(lengths) != 1:
        raise NotComparable("takes rows of one length alone")
    return len(case.rows.lengths), lengths.pop()


def batched(case: Case, place: torch.device, names: str) -> Mapping[str, Tensor]:
    """Packed tokens `[B * T, ...]` by name as `[B, T, ...]` on the device."""
    rows, length = rows_of(case)
    return {
        name: clone_view(case.args[name]).to(place).view(rows, length, *case.args[name].shape[1:])
        for name in names.split()
    }
