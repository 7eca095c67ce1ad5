"""Cases, metric and limits for operators: one call runs a provider or the oracle alike.

A case poisons what nobody may read: free slots, pads, the result buffer and the memory between
strided views hold NaN, and rows without tokens carry live slots. `check` compares with the oracle,
then asserts zero pads and that no byte outside the write set changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from hal import reference
from hal.interfaces import Gate
from hal.model.spec import GateKind

NAN: Final = float("nan")
Call = Callable[..., Tensor]

LIMITS: Final[dict[tuple[str, str], tuple[float, float]]] = {
    ("float32", "one rounding"): (1e-5, 1e-5),
    ("float32", "tf32"): (3e-3, 3e-3),
    ("bfloat16", "one rounding"): (4e-3, 1e-5),
    ("bfloat16", "chunked"): (2e-2, 2e-2),
    ("float16", "one rounding"): (5e-4, 1e-5),
    ("float16", "chunked"): (3e-3, 3e-3),
}
"""(result, state) limits by (dtype, class); a change of one is a change of the kit."""

ROW_KINDS: Final = ("fresh", "continue", "fork", "stateless", "score")


def worst(got: Tensor, want: Tensor, groups: int) -> float:
    """The largest relative Frobenius error over the first `groups` axes; NaN counts as infinite.

    A group that should be all zero must be exactly that. Elements below the smallest normal number
    of the result's dtype have no relative precision, so a group counts as at least that large.
    """
    if want.numel() == 0:
        return 0.0
    dims = tuple(range(groups, want.ndim))
    distance = torch.linalg.vector_norm(got.double() - want.double(), dim=dims)
    size = torch.linalg.vector_norm(want.double(), dim=dims)
    least = torch.finfo(got.dtype).tiny * (want[(0,) * groups].numel() ** 0.5)
    error = distance / size.clamp(min=least)
    return float(error.nan_to_num(nan=float("inf")).max())


def i32(*values: int) -> Tensor:
    """An int32 index tensor."""
    return torch.tensor(values, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class Rows:
    """Slots and bounds of a batch. `pads` tokens follow the last row."""

    lengths: tuple[int, ...]
    src: tuple[int, ...]
    dst: tuple[int, ...]
    start: tuple[int, ...]
    slots: int
    pads: int = 0

    @property
    def bounds(self) -> tuple[int, ...]:
        sums = [0]
        for length in self.lengths:
            sums.append(sums[-1] + length)
        return tuple(sums)

    @property
    def tokens(self) -> int:
        return self.bounds[-1] + self.pads

    def spans(self) -> list[slice]:
        return [slice(b, e) for b, e in pairwise(self.bounds)]

    def written(self, track: Tensor | None) -> set[int]:
        """Slots that a call may change, the sink included."""
        slots = {dst for dst, n in zip(self.dst, self.lengths, strict=True) if dst >= 0 and n}
        tracked = set() if track is None else {int(p[2]) for p in track.tolist() if p[2] >= 0}
        return slots | tracked | {0}


def make_rows(
    rows: Sequence[tuple[int, str]], *, seed: int = 0, pads: int = 0, spare: int = 4
) -> Rows:
    """Give rows of (length, kind) distinct slots in an order that is never the rows' own."""
    free = torch.randperm(2 * len(rows) + spare, generator=torch.Generator().manual_seed(seed))
    ids = [int(i) + 1 for i in free]
    if ids == sorted(ids):
        ids.reverse()
    src, dst, start = [], [], []
    for i, (_, kind) in enumerate(rows):
        old, new = ids[2 * i], ids[2 * i + 1]
        src.append(-1 if kind in ("fresh", "score", "pad") else old)
        dst.append({"continue": old, "fresh": new, "fork": new}.get(kind, -1))
        start.append(0 if src[-1] < 0 else 3 + 7 * i)
    lengths = tuple(length for length, _ in rows)
    return Rows(lengths, tuple(src), tuple(dst), tuple(start), len(ids) + 1, pads)


def poisoned_pool(
    rows: Rows, shape: Sequence[int], dtype: torch.dtype, gen: torch.Generator, pad: int = 0
) -> Tensor:
    """A pool of NaN whose `src` slots hold values; `pad` leaves NaN between its innermost rows."""
    whole = torch.full((rows.slots, *shape[:-1], shape[-1] + pad), NAN, dtype=dtype)
    pool = whole[..., : shape[-1]]
    for slot in set(rows.src) - {-1}:
        pool[slot] = torch.randn(tuple(shape), generator=gen).to(dtype)
    return pool


def _whole(view: Tensor) -> Tensor:
    """Every byte of the storage under a view, as integers."""
    storage = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
    return storage.view({4: torch.int32, 2: torch.int16}[view.element_size()])


def clone_view(view: Tensor) -> Tensor:
    """The same view on a copy of the whole storage."""
    storage = view.untyped_storage().clone()
    copy = torch.empty(0, dtype=view.dtype).set_(storage)
    return copy.as_strided(view.shape, view.stride(), view.storage_offset())


def changed_outside(before: Tensor, after: Tensor, slots: set[int]) -> int:
    """How many elements differ outside the given slots, memory between the slots included."""
    marks = clone_view(after)
    for slot in slots:
        marks[slot] = before[slot]
    return int((_whole(marks) != _whole(before)).sum())


@dataclass(frozen=True, slots=True)
class Errors:
    """What a comparison found: error of result and state, and of the first W-1 tokens (conv)."""

    out: float
    state: float
    head: float = 0.0
    pads: int = 0
    stray: int = 0

    def within(self, limits: tuple[float, float]) -> bool:
        """Whether the errors are inside (result, state) and nothing else was touched."""
        clean = self.pads == 0 and self.stray == 0
        return clean and max(self.out, self.head) <= limits[0] and self.state <= limits[1]


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Arguments of one call by name, and how to judge it."""

    operation: str
    args: dict[str, Any]
    rows: Rows
    layout: str
    heads: int
    options: dict[str, Any] = field(default_factory=dict)
    width: int = 0

    @property
    def track(self) -> Tensor | None:
        track: Tensor | None = self.options.get("track")
        return track

    def run(self, call: Call, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The provider's result and its state, on a copy of the pool."""
        state = clone_view(self.args["state"])
        result = call(**{**self.args, "state": state}, **self.options, out=out)
        return result, state

    def expect(self) -> tuple[Tensor, Tensor]:
        """What the oracle says."""
        oracle = getattr(reference, self.operation.replace(".", "_"))
        result, state = oracle(**self.args, **self.options, layout=self.layout)
        return result, state

    def errors(self, call: Call, *, out: Tensor | None = None) -> Errors:
        """Run and compare; nothing is asserted."""
        got, state = self.run(call, out=out)
        want, wanted = self.expect()
        split = [(got[s], want[s]) for s in self.rows.spans() if s.stop > s.start]
        head = max((_by_head(g[: self.width - 1], w[: self.width - 1], 0) for g, w in split),
                   default=0.0) if self.width else 0.0  # fmt: skip
        slots = sorted(self.rows.written(self.track) - {0})
        return Errors(
            out=max((_by_head(g, w, self.heads) for g, w in split), default=0.0),
            state=worst(state[slots], wanted[slots], 2 if self.heads else 1),
            head=head,
            pads=self._pads(got),
            stray=changed_outside(self.args["state"], state, self.rows.written(self.track)),
        )

    def _pads(self, got: Tensor) -> int:
        """Elements of pad tokens and pad rows that are not zero; NaN is not zero."""
        pads = torch.ones(got.shape[0], dtype=torch.bool)
        for span, src, dst in zip(self.rows.spans(), self.rows.src, self.rows.dst, strict=True):
            if not self.operation.endswith("decode") or src >= 0 or dst >= 0:
                pads[span] = False
        return int((got[pads] != 0).sum())

    def check(self, call: Call, kind: str = "one rounding", *, poison: bool = True) -> None:
        """Assert parity within the limits of this dtype and class, and an exact write set."""
        inputs = self.args["v" if self.heads else "x"]
        out = torch.full_like(inputs, NAN, memory_format=torch.contiguous_format)
        errors = self.errors(call, out=out if poison else None)
        limits = LIMITS[str(inputs.dtype).removeprefix("torch."), kind]
        assert errors.within(limits), f"{self.operation}: {errors}, limits {limits}"

    def replace(self, **args: Any) -> Case:
        """The same case with other arguments."""
        return replace(self, args={**self.args, **args})


def _by_head(got: Tensor, want: Tensor, heads: int) -> float:
    """Error of one row's tokens: per head, or of the row where there are none."""
    if heads:
        return worst(got.transpose(0, 1), want.transpose(0, 1), 1)
    return worst(got.unsqueeze(0), want.unsqueeze(0), 1)


def packed(values: Tensor, rows: Rows, gap: int = 0) -> Tensor:
    """Rows' tokens with NaN pads behind; `gap` makes it a column slice of a wider NaN tensor."""
    values[rows.bounds[-1] :] = NAN
    if not gap:
        return values
    flat = values.flatten(1)
    wide = torch.full((flat.shape[0], flat.shape[1] + 2 * gap), NAN, dtype=values.dtype)
    wide[:, gap : gap + flat.shape[1]] = flat
    view = wide[:, gap : gap + flat.shape[1]]
    return view.unflatten(1, values.shape[1:]) if values.ndim > 2 else view


def _index_args(rows: Rows, decode: bool, strided: bool) -> dict[str, Any]:
    def index(values: Sequence[int]) -> Tensor:
        return torch.stack((i32(*values), i32(*values) * 0 + 99), 1)[:, 0] if strided else (
            i32(*values)
        )  # fmt: skip

    args: dict[str, Any] = {"src": index(rows.src), "dst": index(rows.dst)}
    if not decode:
        args |= {"query_start_loc": index(rows.bounds), "max_len": max((1, *rows.lengths))}
    return args


def conv_case(
    rows: Rows,
    *,
    channels: int = 24,
    width: int = 4,
    bias: bool = True,
    activation: str | None = "silu",
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype | None = None,
    layout: str = "CW",
    decode: bool = False,
    seed: int = 0,
    gap: int = 0,
    strided: bool = False,
    track: Tensor | None = None,
) -> Case:
    """A convolution over the given rows."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows.tokens, channels, generator=gen).to(dtype)
    shape = (channels, width - 1) if layout == "CW" else (width - 1, channels)
    state = poisoned_pool(rows, shape, state_dtype or dtype, gen, pad=gap)
    args: dict[str, Any] = {
        "x": packed(x, rows, gap),
        "weight": torch.randn(channels, width, generator=gen).to(dtype),
        "bias": torch.randn(channels, generator=gen).to(dtype) if bias else None,
        "state": state,
        "start": i32(*rows.start),
    } | _index_args(rows, decode, strided)
    options: dict[str, Any] = {"activation": activation}
    if track is not None:
        options["track"] = track
    name = "conv.decode" if decode else "conv.prefill"
    return Case(name, args, rows, layout, 0, options, width)


@dataclass(frozen=True, slots=True)
class Delta:
    """Dims and inputs of a delta-rule case."""

    H: int = 2
    HV: int = 4
    K: int = 16
    V: int = 24
    gate: GateKind | None = GateKind.SCALAR
    per_channel: bool = False
    beta_scale: float = 1.0
    hard: bool = False
    log_g: float | None = None
    scale: float = 1.0
    qk_l2norm: bool = True


def make_gate(dims: Delta, gen: torch.Generator) -> Gate | None:
    """A gate as models initialise it: A in 1..16, dt in 1e-3..0.1."""
    if dims.gate is None:
        return None
    shape = (dims.HV,) if dims.gate is GateKind.SCALAR else (dims.HV, dims.K)
    dt = torch.exp(torch.rand(shape, generator=gen) * 4.6 - 6.9)
    bound = -5.0 if dims.gate is GateKind.SAFE else None
    A_log = torch.log(1 + 15 * torch.rand(dims.HV, generator=gen))
    bias = dt + torch.log(-torch.expm1(-dt))
    return Gate(dims.gate, A_log, bias, bound, dims.beta_scale)


def _raw_gates(
    dims: Delta, tokens: int, dtype: torch.dtype, gen: torch.Generator
) -> tuple[Tensor, Tensor]:
    channel = dims.per_channel or dims.gate in (GateKind.CHANNEL, GateKind.SAFE)
    shape = (tokens, dims.HV, dims.K) if channel else (tokens, dims.HV)
    a = torch.randn(shape, generator=gen)
    b = torch.randn(tokens, dims.HV, generator=gen) * (2 if dims.hard else 1)
    if dims.gate is not None:
        return a.to(dtype), b.to(dtype)
    g = -a.abs() * (0.1 if dims.log_g is None else 0.0) + (dims.log_g or 0.0)
    return g, dims.beta_scale * torch.sigmoid(b)


def delta_case(
    rows: Rows,
    dims: Delta = Delta(),
    *,
    dtype: torch.dtype = torch.float32,
    layout: str = "VK",
    decode: bool = False,
    seed: int = 0,
    gap: int = 0,
    strided: bool = False,
    track: Tensor | None = None,
) -> Case:
    """A delta rule over the given rows; hard inputs share most of their keys."""
    gen = torch.Generator().manual_seed(seed)
    tokens, H, HV, K, V = rows.tokens, dims.H, dims.HV, dims.K, dims.V
    q, v = torch.randn(tokens, H, K, generator=gen), torch.randn(tokens, HV, V, generator=gen)
    k = torch.randn(tokens, H, K, generator=gen)
    if dims.hard:
        k = torch.randn(1, H, K, generator=gen) + 0.3 * k
    a, b = _raw_gates(dims, tokens, dtype, gen)
    shape = (HV, V, K) if layout == "VK" else (HV, K, V)
    args: dict[str, Any] = {
        "q": packed((q * dims.scale).to(dtype), rows, gap),
        "k": packed((k * dims.scale).to(dtype), rows, gap),
        "v": packed(v.to(dtype), rows, gap),
        "a": packed(a, rows, gap),
        "b": packed(b, rows, gap),
        "gate": make_gate(dims, gen),
        "state": poisoned_pool(rows, shape, torch.float32, gen, pad=gap),
    } | _index_args(rows, decode, strided)
    options: dict[str, Any] = {"qk_l2norm": dims.qk_l2norm}
    if track is not None:
        options["track"] = track
    name = "delta_rule.decode" if decode else "delta_rule.prefill"
    return Case(name, args, rows, layout, HV, options)
