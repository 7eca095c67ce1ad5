"""The Protocols that a provider implements; importing them imports no torch.

Every operation follows one row rule. Row i owns the tokens from `query_start_loc[i]` up to
`query_start_loc[i+1]`, starts from zeros if `src[i] < 0` else from `state[src[i]]`, and leaves
its end state in `state[dst[i]]` if `dst[i] >= 0` and the row has tokens. A row without tokens is
a no-op. Pad tokens (at or after `query_start_loc[B]`) and pad rows get exactly zero. Only
addressed slots are written.

`max_len` is a host integer, an upper bound of the rows' lengths for the grid of a launch and never
read back; rows may all be shorter. In verify it is at most the width that scratch was made for.
Several rows may start from one `src` as long as no other row writes it.

B rows, T packed tokens, S slots including the reserved slot 0, C conv channels, W conv width,
H and HV key and value heads, K and V their dims. `act` is the activation dtype.
"""

from hal.interfaces.conv import Conv
from hal.interfaces.conv_state import ConvState, ConvStep
from hal.interfaces.delta_rule import DeltaRule, Gate
from hal.interfaces.provider import Provider, Scratch
from hal.interfaces.scan import Scan

__all__ = [
    "Conv",
    "ConvState",
    "ConvStep",
    "DeltaRule",
    "Gate",
    "Provider",
    "Scan",
    "Scratch",
]
