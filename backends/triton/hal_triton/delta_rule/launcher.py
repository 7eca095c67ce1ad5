"""The gated delta rule, as engines call it."""

from collections.abc import Sequence

from torch import Tensor

from hal.interfaces import Gate
from hal_triton.delta_rule.call import DeltaCall, gate_constants
from hal_triton.delta_rule.commit import CommitCall, CommitRunner
from hal_triton.delta_rule.decode import DecodeRunner
from hal_triton.delta_rule.fused import FusedCall, FusedRunner, NormRunner, make_norm
from hal_triton.delta_rule.prefill import PrefillRunner
from hal_triton.delta_rule.verify import VerifyCall, VerifyRunner
from hal_triton.tuning import Tuning


class TritonDeltaRule:
    """Offers `decode` and chunked `prefill` with every gate.

    `decode_fused` needs the conv state as a ring. Track points of a prefill lie at multiples of
    its chunk, 64, or at a row's end.
    """

    def __init__(self, tuning: Tuning, layout: str = "VK") -> None:
        self._layout = layout
        self._decode = DecodeRunner(tuning, layout)
        self._prefill = PrefillRunner(tuning, layout)
        self._fused = FusedRunner(tuning, layout)
        self._norm = NormRunner(tuning)
        self._verify = VerifyRunner(tuning, layout)
        self._commit = CommitRunner(tuning, layout)

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
        """Run any mixture of rows, one-token continuations included; track i32 `[M, 3]`."""
        return self._prefill(
            DeltaCall(
                "delta_rule.prefill",
                q,
                k,
                v,
                a,
                b,
                gate,
                state,
                src,
                dst,
                query_start_loc,
                track,
                qk_l2norm,
                out,
            )
        )

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
        """Advance every row by one token and read its new state; pad rows exactly zero."""
        return self._decode(
            DeltaCall(
                "delta_rule.decode",
                q,
                k,
                v,
                a,
                b,
                gate,
                state,
                src,
                dst,
                qk_l2norm=qk_l2norm,
                out=out,
            )
        )

    def verify(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        gate: Gate | None,
        state: Tensor,
        src: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        scratch: Sequence[Tensor],
        *,
        parents: Tensor | None = None,
        qk_l2norm: bool = True,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run up to 16 draft tokens a row, each from the state of its parent; state is only read.

        The committed state is read once a row, whatever the number of tokens.
        """
        delta = DeltaCall(
            "delta_rule.verify", q, k, v, a, b, gate, state, src, src, query_start_loc,
            qk_l2norm=qk_l2norm, out=out,
        )  # fmt: skip
        return self._verify(VerifyCall(delta, max_len, scratch, parents))

    def commit(
        self,
        state: Tensor,
        scratch: Sequence[Tensor],
        src: Tensor,
        dst: Tensor,
        query_start_loc: Tensor,
        last: Tensor,
    ) -> None:
        """Replay the path to row-relative token `last` (-1: write nothing) into `dst`."""
        self._commit(CommitCall(state, scratch, src, dst, query_start_loc, last))

    def decode_fused(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        activation: str | None,
        gate: Gate | None,
        conv_state: Tensor,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        start: Tensor,
        *,
        z: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        out: Tensor | None = None,
    ) -> Tensor:
        """Equal `Conv.decode`, split, `decode` and the gated norm; mixed_qkv `[B, C]`.

        The rounding between conv and recurrence is left out.
        """
        norm = make_norm("delta_rule.decode_fused", z, norm_weight, norm_eps)
        return self._fused(
            FusedCall(
                mixed_qkv,
                a,
                b,
                conv_weight,
                conv_bias,
                activation,
                gate,
                conv_state,
                state,
                src,
                dst,
                start,
                norm,
                out,
            )
        )

    def prefill_fused(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        gate: Gate | None,
        state: Tensor,
        src: Tensor,
        dst: Tensor,
        query_start_loc: Tensor,
        max_len: int,
        *,
        z: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        out: Tensor | None = None,
        track: Tensor | None = None,
    ) -> Tensor:
        """Equal split, `prefill` and the gated norm; mixed_qkv `[T, C]` after the conv, a view."""
        name = "delta_rule.prefill_fused"
        norm = make_norm(name, z, norm_weight, norm_eps)
        q, k, v = split(name, mixed_qkv, state, self._layout)
        if norm is not None:
            norm.check(name, tuple(v.shape), mixed_qkv)
        result = self._prefill(
            DeltaCall(name, q, k, v, a, b, gate, state, src, dst, query_start_loc, track, True, out)
        )
        if norm is not None:
            silu = not gate_constants(gate, a)["CHANNEL"]
            self._norm(result, norm, result, silu=silu, query_start_loc=query_start_loc)
        return result


def split(
    operation: str, mixed_qkv: Tensor, state: Tensor, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k `[T, H, K]` and v `[T, HV, V]`, whose sizes the state and C give."""
    if mixed_qkv.ndim != 2 or state.ndim != 4:
        raise ValueError(
            f"{operation}: mixed_qkv is {list(mixed_qkv.shape)}, state is {list(state.shape)}: "
            f"expected 2 and 4 dimensions"
        )
    tokens, channels = mixed_qkv.shape
    _, heads, first, second = state.shape
    V, K = (first, second) if layout == "VK" else (second, first)
    wide = channels - heads * V
    if wide <= 0 or wide % (2 * K):
        raise ValueError(
            f"{operation}: mixed_qkv has {channels} channels, expected 2*H*{K} + {heads * V} "
            f"for state {list(state.shape)}"
        )
    q, k, v = mixed_qkv.split_with_sizes((wide // 2, wide // 2, heads * V), dim=1)
    keys = (tokens, wide // (2 * K), K)
    return q.view(keys), k.view(keys), v.view(tokens, heads, V)
