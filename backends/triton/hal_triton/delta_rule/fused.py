"""Plans and launches of fused decode and of the gated norm."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.runtime.checks import check_conv, check_out, check_rows, check_same
from hal_triton.delta_rule.call import (
    DeltaCall,
    Dims,
    gate_constants,
    gate_numbers,
    gate_tensors,
    result_strides,
    state_strides,
)
from hal_triton.delta_rule.kernels.fused import delta_decode_fused
from hal_triton.delta_rule.kernels.norm import gated_norm
from hal_triton.launch import Launch, Plans, dense, rows_are_dense, signature
from hal_triton.tuning import Config, Tuning, block

_NAME = "delta_rule.decode_fused"


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """The gated norm behind a recurrence: z `[T, HV, V]`, weight `[V]`."""

    z: Tensor
    weight: Tensor
    eps: float

    def tensors(self) -> tuple[Tensor, Tensor]:
        """The gate and the weight."""
        return self.z, self.weight

    def dense(self) -> "Norm":
        """The same norm of dense copies."""
        return Norm(dense(self.z), dense(self.weight), self.eps)

    def check(self, operation: str, shape: tuple[int, ...], like: Tensor) -> None:
        """Refuse a gate or weight that does not fit the result."""
        check_same(operation, "z", self.z, like.dtype, "mixed_qkv")
        for name, tensor, expected in (
            ("z", self.z, shape),
            ("norm_weight", self.weight, shape[-1:]),
        ):
            if tuple(tensor.shape) != expected:
                raise ValueError(
                    f"{operation}: {name} is {list(tensor.shape)}, expected {list(expected)}"
                )


def make_norm(operation: str, z: Tensor | None, weight: Tensor | None, eps: float) -> Norm | None:
    """The norm that a call asks for, None where z is not given."""
    if z is None:
        return None
    if weight is None:
        raise ValueError(f"{operation}: z was given without norm_weight")
    return Norm(z, weight, eps)


class NormRunner:
    """Norms and gates a recurrence's output, which it reads before the one rounding if it can."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._plans: Plans[Launch] = Plans()

    def __call__(
        self,
        o: Tensor,
        norm: Norm,
        out: Tensor,
        *,
        silu: bool,
        rows: tuple[Tensor, Tensor] | None = None,
        query_start_loc: Tensor | None = None,
    ) -> None:
        """Put rms(o) * weight * silu(z), or sigmoid(z), of o `[T, HV, V]` into `out`, maybe o.

        `rows` are src and dst of a decode, `query_start_loc` that of packed rows: pads give zeros
        whatever z holds there.
        """
        if not rows_are_dense(*norm.tensors()):
            norm = norm.dense()
        if not rows_are_dense(o, out):
            held = dense(o)
            self(held, norm, held, silu=silu, rows=rows, query_start_loc=query_start_loc)
            out.copy_(held)
            return
        starts = None if query_start_loc is None else dense(query_start_loc)
        pads = "rows" if rows is not None else "" if starts is None else "tail"
        key = (silu, norm.eps, pads, signature(o, norm.z, norm.weight, out, starts))
        launch = self._plans.get(key)
        if launch is None:
            count = 0 if starts is None else starts.shape[0] - 1
            launch = self._plans.put(key, self._plan(o, norm, out, silu, pads, count))
        src, dst = rows or ((o, o) if starts is None else (starts, starts))
        launch(o, norm.z, norm.weight, src, dst, out)

    def _plan(self, o: Tensor, norm: Norm, out: Tensor, silu: bool, pads: str, rows: int) -> Launch:
        tokens, heads, dim = o.shape
        count, config = tokens * heads, self._tuning.pick("norm", tokens * heads)
        numbers = (*o.stride()[:2], *norm.z.stride()[:2], *out.stride()[:2], count, rows, norm.eps)
        constants = {
            **{"HV": heads, "V": dim, "BR": config.blocks["BR"], "BV": block(dim)},
            **{"SILU": silu, "PADS": pads},
        }
        programs = -(-count // config.blocks["BR"])
        return Launch(gated_norm, programs, numbers, constants, config.options, o.device)


@dataclass(frozen=True, slots=True, eq=False)
class FusedCall:
    """The arguments of one fused decode."""

    x: Tensor
    a: Tensor
    b: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str | None
    gate: Gate | None
    conv_state: Tensor
    state: Tensor
    src: Tensor
    dst: Tensor
    start: Tensor
    norm: Norm | None
    out: Tensor | None

    def tokens(self) -> tuple[Tensor, ...]:
        """The tensors of a step that the kernel reads with a dense last axis."""
        return self.x, self.a, self.b, *(() if self.norm is None else self.norm.tensors())

    def dense(self) -> "FusedCall":
        """The same call on dense copies, without `out`."""
        norm = self.norm and self.norm.dense()
        return replace(
            self, x=dense(self.x), a=dense(self.a), b=dense(self.b), src=dense(self.src),
            dst=dense(self.dst), start=dense(self.start), norm=norm, out=None,
        )  # fmt: skip

    def signature(self) -> tuple[object, ...]:
        """What decides the plan of this call; a gate is known by its identity."""
        norm = () if self.norm is None else self.norm.tensors()
        eps = None if self.norm is None else self.norm.eps
        held = signature(
            self.x, self.a, self.b, self.weight, self.bias, self.conv_state, self.state, self.src,
            self.dst, self.start, self.out, *norm,
        )  # fmt: skip
        return self.gate, self.activation, eps, held

    def dims(self, layout: str) -> Dims:
        """Heads and dims; the state names all but the key heads, which the channels give."""
        _, heads, first, second = self.state.shape
        V, K = (first, second) if layout == "VK" else (second, first)
        return Dims((self.x.shape[1] - heads * V) // (2 * K), heads, K, V)


class FusedRunner:
    """Runs fused decodes; the conv state is a ring.

    Where a tile is not a whole head, the norm is a second launch, and what passes between the two
    is float32: the result is rounded once either way.
    """

    def __init__(self, tuning: Tuning, layout: str) -> None:
        self._tuning, self._layout = tuning, layout
        self._norm = NormRunner(tuning)
        self._plans: Plans[tuple[Launch, Dims, bool]] = Plans()

    def __call__(self, call: FusedCall) -> Tensor:
        """Conv, split, recurrence and gated norm, act `[B, HV, V]`; steps of any strides."""
        if not rows_are_dense(call.src, call.dst, call.start, call.out):
            return self._densely(call)
        key = call.signature()
        plan = self._plans.get(key)
        if plan is None:
            _check(call, self._layout)
            if not rows_are_dense(*call.tokens()):
                return self._densely(call)
            plan = self._plans.put(key, self._plan(call))
        launch, dims, norms_later = plan
        x, state, norm = call.x, call.state, call.norm
        shape = (x.shape[0], dims.HV, dims.V)
        out = x.new_empty(shape) if call.out is None else call.out
        rate, bias = gate_tensors(call.gate, state)
        z, norm_weight = (x, x) if norm is None else (norm.z, norm.weight)
        o = x.new_empty(shape, dtype=torch.float32) if norms_later else out
        launch(
            x, call.a, call.b, call.weight, call.weight if call.bias is None else call.bias, rate,
            bias, call.conv_state, state, call.src, call.dst, call.start, z, norm_weight, o,
        )  # fmt: skip
        if norm is not None and norms_later:
            silu = not gate_constants(call.gate, call.a)["CHANNEL"]
            self._norm(o, norm, out, silu=silu, rows=(call.src, call.dst))
        return out

    def _densely(self, call: FusedCall) -> Tensor:
        """The same on dense copies and a dense result, which is then copied into `out`."""
        result = self(call.dense())
        return result if call.out is None else call.out.copy_(result)

    def _plan(self, call: FusedCall) -> tuple[Launch, Dims, bool]:
        dims, rows = call.dims(self._layout), call.x.shape[0]
        channel = gate_constants(call.gate, call.a)["CHANNEL"]
        kind = ".channel" if channel else "" if call.norm is None else ".norm"
        config = self._tuning.pick(f"{_NAME}{kind}", rows * dims.HV)
        config = config.for_inputs(call.x.element_size())
        BV = min(config.blocks["BV"], block(dims.V))
        norm_inside = call.norm is not None and BV >= dims.V
        norms_later = call.norm is not None and not norm_inside
        programs = rows * dims.HV * -(-dims.V // BV)
        launch = Launch(
            delta_decode_fused, programs, self._numbers(call, dims, norms_later),
            self._constants(call, dims, config, BV, norm_inside), config.options, call.x.device,
        )  # fmt: skip
        return launch, dims, norms_later

    def _numbers(self, call: FusedCall, dims: Dims, norms_later: bool) -> tuple[float, ...]:
        c_slot, c_row, _ = call.conv_state.stride()
        z_strides = (0, 0) if call.norm is None else call.norm.z.stride()[:2]
        return (
            *(call.x.stride(0), *call.a.stride()[:2], call.b.stride(0), *call.weight.stride()),
            *(c_slot, c_row, *state_strides(call.state, self._layout)[:2], *z_strides),
            *result_strides(None if norms_later else call.out, dims),
            *gate_numbers(call.gate, dims.K),
            1e-6 if call.norm is None else call.norm.eps,
        )

    def _constants(
        self, call: FusedCall, dims: Dims, config: Config, BV: int, norm: bool
    ) -> dict[str, object]:
        _, _, s_v, s_k = state_strides(call.state, self._layout)
        return {
            **{"s_v": s_v, "s_k": s_k},
            **{"HV": dims.HV, "R": dims.ratio, "K": dims.K, "V": dims.V},
            **{"W": call.weight.shape[1], "BK": block(dims.K), "BV": BV},
            **{"HAS_BIAS": call.bias is not None, "ACTIVATE": call.activation is not None},
            **gate_constants(call.gate, call.a),
            **{"L2": True, "NORM": norm, "SILU": self._tuning.silu, "EVICT": config.evict},
        }


def _check(call: FusedCall, layout: str) -> None:
    """Refuse what does not fit; the parts are held to the rules of conv and recurrence."""
    x, state = call.x, call.state
    check_conv(_NAME, x, call.weight, call.bias, call.conv_state, "ring", call.activation, None)
    check_rows(_NAME, x.shape[0], call.src, (("dst", call.dst), ("start", call.start)), None)
    if state.ndim != 4:
        raise ValueError(f"{_NAME}: state is {list(state.shape)}, expected 4 dimensions")
    dims = call.dims(layout)
    sizes = [dims.H * dims.K, dims.H * dims.K, dims.HV * dims.V]
    if sum(sizes) != x.shape[1] or dims.H < 1:
        raise ValueError(
            f"{_NAME}: mixed_qkv has {x.shape[1]} channels, expected 2*H*{dims.K} + "
            f"{dims.HV * dims.V} for state {list(state.shape)}"
        )
    q, k, v = x.split_with_sizes(sizes, 1)
    keys = (x.shape[0], dims.H, dims.K)
    q, k, v = q.reshape(keys), k.reshape(keys), v.reshape(x.shape[0], dims.HV, dims.V)
    DeltaCall(_NAME, q, k, v, call.a, call.b, call.gate, state, call.src, call.dst).check(layout)
    check_out(_NAME, call.out, v.shape, x.dtype)
    if call.norm is not None:
        call.norm.check(_NAME, tuple(v.shape), x)
    if not rows_are_dense(call.conv_state):
        strides = call.conv_state.stride()
        raise ValueError(f"{_NAME}: conv_state has strides {strides}, expected a dense last axis")
