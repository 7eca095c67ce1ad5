"""Operators for Acme accelerators: one loop over rows and tokens, in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu

from hal.interfaces import Gate, Scratch
from hal.runtime.checks import check_conv, check_delta, check_rows
from hal_registry import Presence


def probe(index: int | None) -> Presence:
    """Count the devices; nobody has built an Acme accelerator yet."""
    return Presence(0, detail="Acme accelerators are not made yet")


def rows(src: Tensor, dst: Tensor, bounds: Sequence[int]) -> Iterator[tuple[range, int, int]]:
    """The tokens and slots of every row that has tokens."""
    slots = zip(pairwise(bounds), src.tolist(), dst.tolist(), strict=True)
    for (begin, end), source, target in slots:
        if end > begin:
            yield range(begin, end), source, target


def token_rows(src: Tensor, dst: Tensor) -> Iterator[tuple[range, int, int]]:
    """The rows of a decode: one token each, and padding has neither slot."""
    for token, (source, target) in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
        if source >= 0 or target >= 0:
            yield range(token, token + 1), source, target


def start(state: Tensor, slot: int) -> Tensor:
    """What a row starts from: a copy of its slot, or zeros."""
    return state[slot].clone() if slot >= 0 else torch.zeros_like(state[0])


class AcmeConv:
    """The convolution on windows of layout "WC"."""

    def prefill(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        start: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        *,
        activation: str | None = None,
        out: Tensor | None = None,
        track: Tensor | None = None,
    ) -> Tensor:
        """Convolve any mixture of rows."""
        check_conv("conv.prefill", x, weight, bias, state, "WC", activation, out)
        check_rows("conv.prefill", len(x), src, (("dst", dst), ("start", start)), query_start_loc)
        work = rows(src, dst, query_start_loc.tolist())
        return _conv(x, weight, bias, state, activation, out, work)

    def decode(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        start: Tensor,
        *,
        activation: str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Convolve one token a row."""
        check_conv("conv.decode", x, weight, bias, state, "WC", activation, out)
        check_rows("conv.decode", len(x), src, (("dst", dst), ("start", start)), None)
        return _conv(x, weight, bias, state, activation, out, token_rows(src, dst))


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    activation: str | None,
    out: Tensor | None,
    work: Iterator[tuple[range, int, int]],
) -> Tensor:
    out = torch.zeros_like(x) if out is None else out.zero_()
    taps = weight.float().t()
    for tokens, source, target in work:
        window = start(state, source)
        for t in tokens:
            seen = torch.cat((window, x[t : t + 1].to(window.dtype)))
            y = (seen.float() * taps).sum(0)
            y = y if bias is None else y + bias.float()
            out[t] = silu(y) if activation == "silu" else y
            window = seen[1:]
        if target >= 0:
            state[target] = window
    return out


class AcmeDeltaRule:
    """The delta rule on states of layout "KV", with ready gates."""

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        gate: Gate | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        *,
        qk_l2norm: bool = True,
        out: Tensor | None = None,
        track: Tensor | None = None,
    ) -> Tensor:
        """Run any mixture of rows."""
        check_delta("delta_rule.prefill", q, k, v, a, b, gate, state, "KV", out)
        check_rows("delta_rule.prefill", len(q), src, (("dst", dst),), query_start_loc)
        work = rows(src, dst, query_start_loc.tolist())
        return _delta(q, k, v, a, b, state, qk_l2norm, out, work)

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        gate: Gate | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        *,
        qk_l2norm: bool = True,
        out: Tensor | None = None,
    ) -> Tensor:
        """Advance every row by one token."""
        check_delta("delta_rule.decode", q, k, v, a, b, gate, state, "KV", out)
        check_rows("delta_rule.decode", len(q), src, (("dst", dst),), None)
        return _delta(q, k, v, a, b, state, qk_l2norm, out, token_rows(src, dst))


def _delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    qk_l2norm: bool,
    out: Tensor | None,
    work: Iterator[tuple[range, int, int]],
) -> Tensor:
    out = torch.zeros_like(v, memory_format=torch.contiguous_format) if out is None else out.zero_()
    q, k = (_keys(x, v.shape[1], qk_l2norm) for x in (q, k))
    q, v, g, beta = q * q.shape[-1] ** -0.5, v.float(), g.float(), beta.float()
    for tokens, source, target in work:
        S = start(state, source)
        for t in tokens:
            S = S * g[t].exp().view(-1, 1, 1)
            u = beta[t].unsqueeze(-1) * (v[t] - (S * k[t].unsqueeze(-1)).sum(1))
            S = S + k[t].unsqueeze(-1) * u.unsqueeze(1)
            out[t] = (S * q[t].unsqueeze(-1)).sum(1)
        if target >= 0:
            state[target] = S
    return out


def _keys(x: Tensor, heads: int, qk_l2norm: bool) -> Tensor:
    """Keys or queries in float32, normed, one for every value head."""
    x = x.float()
    if qk_l2norm:
        x = x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    return x.repeat_interleave(heads // x.shape[1], 1)


class AcmeProvider:
    """Serves convolution and delta rule on `acme` devices, whose memory is the host's."""

    def __init__(self, device: str, options: Mapping[str, object]) -> None:
        layouts = options.get("layouts", {})
        for state, layout in (("conv", "WC"), ("recurrent", "KV")):
            asked = layouts.get(state, layout) if isinstance(layouts, Mapping) else layouts
            if asked != layout:
                raise ValueError(f"acme.torch: layout of {state} is {asked}, expected {layout}")
        self.conv = AcmeConv()
        self.delta_rule = AcmeDeltaRule()
        self.scan = None
        self.conv_state = None

    def prepare(self, params: Mapping[str, Tensor | None]) -> Mapping[str, Tensor | None]:
        """Keep the weights as they are."""
        return params

    def scratch_spec(
        self, interface: str, shapes: Mapping[str, Sequence[int]], max_batch: int, width: int
    ) -> Sequence[Scratch]:
        """No tensors: verify is not offered."""
        return ()

    def warmup(self) -> None:
        """Compile nothing."""
