"""A tape reruns the operations of its block on the very tensors of the recording."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hal.errors import StepOrderError
from hal.runtime.tape import Tape

Move = Callable[[Tensor, Tensor], Tensor]
MOVES: dict[str, Move] = {
    "matmul": lambda x, y: (x @ y.T) / 4,
    "view": lambda x, y: x.reshape(-1).view(4, 4).T,
    "slice": lambda x, y: torch.cat((x[:2], y[2:])),
    "in place": lambda x, y: x.add_(y),
    "masked": lambda x, y: x.masked_fill_(y > 0, 0.5),
    "copy": lambda x, y: y.clone().copy_(x.flip(0)),
    "write": lambda x, y: y.clone().index_copy_(0, torch.tensor([2, 0]), x[:2]),
    "out": lambda x, y: torch.mul(x, y, out=torch.empty(4, 4)),
    "norm": lambda x, y: x.softmax(-1) * y.mean(),
    "parts": lambda x, y: torch.stack([*x.unbind(0)[:2], *y.split(1)[2][:1].expand(2, 4)]),
    "places": lambda x, y: x[torch.tensor([3, 0, 0, 1])] + y[:, torch.tensor([1, 1, 2, 3])],
    "half": lambda x, y: x.bfloat16().float() + y,
}


def run(names: list[str], x: Tensor, y: Tensor) -> Tensor:
    """Every move on the result of the last two."""
    for name in names:
        x, y = y, MOVES[name](x, y)
    return y


@settings(deadline=None)
@given(st.lists(st.sampled_from(sorted(MOVES)), max_size=8), st.integers(0, 99))
def test_a_replay_gives_what_the_block_gives_on_new_inputs(names: list[str], seed: int) -> None:
    torch.manual_seed(seed)
    x, y, tape = torch.randn(4, 4), torch.randn(4, 4), Tape()
    with torch.inference_mode(seed % 2 == 0), tape:
        kept = run(names, x, y)
    for _ in range(2):
        fresh = [torch.randn(4, 4), torch.randn(4, 4)]
        with torch.inference_mode():
            x.copy_(fresh[0])
            y.copy_(fresh[1])
            want = run(names, *fresh)
        tape.replay()
        assert torch.equal(kept, want)


def test_python_of_the_block_does_not_run_again() -> None:
    tape, runs = Tape(), []
    x = torch.ones(2)
    with tape:
        runs.append(1)
        y = x + len(runs)
    runs.append(2)
    x.fill_(5)
    tape.replay()
    assert y.tolist() == [6, 6] and len(runs) == 2


def test_an_opaque_call_reads_its_tensors_in_every_replay() -> None:
    def pick(values: Tensor, index: Tensor, *, scale: int) -> tuple[Tensor, None]:
        return values[index.tolist()] * scale, None

    tape, values, index = Tape(), torch.arange(6.0), torch.tensor([0, 1])
    with tape:
        found, nothing = tape.opaque(pick)(values, index, scale=3)
        more = found + 1
    assert nothing is None and found.tolist() == [0, 3]
    index.copy_(torch.tensor([5, 2]))
    tape.replay()
    assert found.tolist() == [15, 6] and more.tolist() == [16, 7]


def test_an_opaque_call_that_fails_is_not_kept() -> None:
    def fail(x: Tensor) -> Tensor:
        raise KeyError("mine")

    tape, x = Tape(), torch.ones(1)
    with tape:
        with pytest.raises(KeyError, match="mine"):
            tape.opaque(fail)(x)
        y = x * 2
    x.fill_(3)
    tape.replay()
    assert y.tolist() == [6]


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x[0] > 0),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_a_block_that_looks_at_a_value_is_refused(
    look: Callable[[Tensor], object], inference: bool
) -> None:
    with pytest.raises(StepOrderError, match=r"capture: aten.* reads a tensor's value"):
        with torch.inference_mode(inference), Tape():
            look(torch.ones(3))


@pytest.mark.parametrize(
    ("look", "name"),
    [
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.numpy(), "numpy"),
        (np.asarray, "__array__"),
        (np.from_dlpack, "__dlpack__"),
    ],
)
def test_memory_that_is_read_past_torch_is_refused_in_a_block_and_not_in_a_provider(
    look: Callable[[Tensor], object], name: str
) -> None:
    tape, x = Tape(), torch.ones(3)
    with pytest.raises(StepOrderError, match=f"capture: {name} reads a tensor's value"):
        with tape.recording():
            look(x)

    def provider(given: Tensor) -> Tensor:
        look(given)
        return given * 2

    with tape.recording():
        y = tape.opaque(provider)(x)
    look(y)
    x.fill_(4)
    tape.replay()
    assert y.tolist() == [8, 8, 8]


def test_an_index_of_bools_or_bytes_is_a_look_at_their_values() -> None:
    x = torch.ones(3)
    with Tape():
        for chosen in (x > 0, torch.ones(3, dtype=torch.uint8)):
            with pytest.raises(StepOrderError, match=r"aten.* reads a tensor's value"):
                x[chosen]


def test_nothing_is_kept_behind_the_block() -> None:
    tape, x = Tape(), torch.zeros(1)
    with tape:
        pass
    x.add_(1)
    tape.replay()
    assert x.item() == 1
