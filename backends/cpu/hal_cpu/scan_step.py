"""One token a row of the scan: decay, add, read, in place."""

import torch
from torch import Tensor

from hal_cpu.recurrent import IN_PLACE_ELEMENTS
from hal_cpu.rows import Steps, gather, scatter, start_state
from hal_cpu.scan_inputs import Operands


def advance_rows(operands: Operands, state: Tensor, steps: Steps) -> Tensor:
    """Advance each row by its token; state `[S, H, P, N]`, result float32 `[n, H, P]`."""
    if state[0].numel() < IN_PLACE_ELEMENTS:
        ends = gather(state, steps.sources)
        result = advance(operands, ends)
        scatter(state, steps.targets, ends)
        return result
    pairs = zip(steps.sources, steps.targets, strict=True)
    results = [
        advance(operands.rows(slice(i, i + 1)), start_state(state, *pair).unsqueeze(0))
        for i, pair in enumerate(pairs)
    ]
    return torch.cat(results)


def advance_held(operands: Operands, held: Tensor) -> Tensor:
    """Advance states `[n, H, P, N]` that nobody else holds; a large one by itself."""
    if held[0].numel() < IN_PLACE_ELEMENTS:
        return advance(operands, held)
    cuts = [slice(i, i + 1) for i in range(held.shape[0])]
    return torch.cat([advance(operands.rows(cut), held[cut]) for cut in cuts])


def advance(operands: Operands, state: Tensor) -> Tensor:
    """S = S decay + update B^T in place; what C reads of the new S, `[n, H, P]`."""
    state.mul_(operands.decay).addcmul_(operands.update.unsqueeze(-1), operands.B.unsqueeze(2))
    return read(state, operands)


def read(state: Tensor, operands: Operands) -> Tensor:
    """What C reads of states `[n, H, P, N]`: `[n, H, P]`.

    A batched product takes another routine where it is a batch of one, so Mamba-1, whose one group
    is one head, multiplies and sums: a row's bits must not depend on its company.
    """
    if operands.by_channel:
        return (state * operands.C.unsqueeze(2)).sum(-1)
    # The vector from the left takes a quarter of the time that it takes from the right.
    vectors, matrices = operands.C.flatten(0, 1), state.flatten(0, 1)
    return torch.bmm(vectors.unsqueeze(1), matrices.transpose(1, 2)).view(state.shape[:3])
