"""Plans and launches of plain decode."""

from torch import Tensor

from hal_triton.delta_rule.call import (
    DeltaCall,
    gate_constants,
    gate_numbers,
    gate_tensors,
    result_strides,
    state_strides,
)
from hal_triton.delta_rule.kernels.decode import delta_decode
from hal_triton.launch import Launch, Plans
from hal_triton.tuning import Tuning, block


class DecodeRunner:
    """Runs decode calls on one state layout; a signature is checked and planned once."""

    def __init__(self, tuning: Tuning, layout: str) -> None:
        self._tuning, self._layout = tuning, layout
        self._plans: Plans[Launch] = Plans()

    def __call__(self, call: DeltaCall) -> Tensor:
        """One token a row, act `[B, HV, V]`."""
        key = call.signature()
        launch = self._plans.get(key)
        if launch is None:
            call.check(self._layout)
            if not call.is_tidy():
                result = self(call.tidied())
                return result if call.out is None else call.out.copy_(result)
            launch = self._plans.put(key, self._plan(call))
        v, state = call.v, call.state
        out = v.new_empty(v.shape) if call.out is None else call.out
        rate, bias = gate_tensors(call.gate, state)
        launch(call.q, call.k, v, call.a, call.b, rate, bias, state, call.src, call.dst, out)
        return out

    def _plan(self, call: DeltaCall) -> Launch:
        dims, rows = call.dims, call.src.shape[0]
        config = self._tuning.pick("delta_rule.decode", rows * dims.HV)
        config = config.for_inputs(call.v.element_size())
        s_slot, s_h, s_v, s_k = state_strides(call.state, self._layout)
        BV = min(config.blocks["BV"], block(dims.V))
        numbers = (
            *(*call.q.stride()[:2], *call.k.stride()[:2], *call.v.stride()[:2]),
            *(*call.a.stride()[:2], call.b.stride(0)),
            *result_strides(call.out, dims),
            *(s_slot, s_h),
            *gate_numbers(call.gate, dims.K),
        )
        constants = {
            **{"s_v": s_v, "s_k": s_k},
            **{"HV": dims.HV, "R": dims.ratio, "K": dims.K, "V": dims.V},
            **{"BK": block(dims.K), "BV": BV, "L2": call.qk_l2norm, "EVICT": config.evict},
            **gate_constants(call.gate, call.a),
        }
        programs = rows * dims.HV * -(-dims.V // BV)
        return Launch(delta_decode, programs, numbers, constants, config.options, call.v.device)
