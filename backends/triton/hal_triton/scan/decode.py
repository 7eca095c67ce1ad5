"""Plans and launches of decode."""

from torch import Tensor

from hal_triton.launch import Launch, Plans
from hal_triton.scan.call import ScanCall, forms, input_strides, inputs, limits, state_strides
from hal_triton.scan.kernels.decode import scan_decode
from hal_triton.tuning import Tuning, block


class DecodeRunner:
    """Runs decode calls; a signature is checked and planned once."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._plans: Plans[Launch] = Plans()

    def __call__(self, call: ScanCall) -> Tensor:
        """One token a row, act of x's shape."""
        key = call.signature()
        launch = self._plans.get(key)
        if launch is None:
            call.check()
            if not call.is_tidy():
                result = self(call.tidied())
                return result if call.out is None else call.out.copy_(result)
            launch = self._plans.put(key, self._plan(call))
        out = call.x.new_empty(call.x.shape) if call.out is None else call.out
        launch(*inputs(call), call.state, call.src, call.dst, out)
        return out

    def _plan(self, call: ScanCall) -> Launch:
        dims, rows = call.dims, call.src.shape[0]
        name = "scan.decode.channel" if call.by_channel else "scan.decode"
        config = self._tuning.pick(name, rows * dims.H * dims.P)
        BP = min(config.blocks["BP"], block(dims.P))
        s_slot, s_h, s_p, s_n = state_strides(call.state, dims)
        numbers = (*input_strides(call), s_slot, s_h, *limits(call))
        constants = {
            **{"s_p": s_p, "s_n": s_n, "H": dims.H, "R": dims.ratio, "P": dims.P, "N": dims.N},
            **{"BP": BP, "BN": block(dims.N), **forms(call, self._tuning), "EVICT": config.evict},
        }
        programs = rows * dims.H * -(-dims.P // BP)
        return Launch(scan_decode, programs, numbers, constants, config.options, call.x.device)
