"""A step that starts early waits for whatever was launched before it, on any stream."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.model.spec import GateKind
from support import device_checks as checks

pytestmark = pytest.mark.cuda
ROWS, H, HV, D = 8, 2, 4, 128
STEPS = 3


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=checks.DEVICE).to(dtype)


class Step:
    """A recurrence that reads `v`, behind work that writes it and takes much longer."""

    def __init__(self) -> None:
        self.source, self.v, self.out = normal(1 << 25), normal(ROWS, HV, D), normal(ROWS, HV, D)
        self.q, self.k = normal(ROWS, H, D), normal(ROWS, H, D)
        self.a, self.b = normal(ROWS, HV), normal(ROWS, HV)
        law = normal(HV, dtype=torch.float32)
        self.gate = Gate(GateKind.SCALAR, law, law)
        self.state = normal(ROWS + 1, HV, D, D, dtype=torch.float32)
        self.slots = torch.arange(1, ROWS + 1, device=checks.DEVICE, dtype=torch.int32)
        self.side = torch.cuda.Stream()
        self.rule = checks.provider().delta_rule

    def work(self) -> None:
        """Kernels: the last one writes `v`."""
        grown = self.source * 1.5 + 1.0
        self.v.copy_(grown[-self.v.numel() :].view_as(self.v))

    def elsewhere(self) -> None:
        """The same on another stream."""
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            self.work()
        here.wait_stream(self.side)

    def run(self) -> None:
        """The recurrence."""
        self.rule.decode(
            self.q, self.k, self.v, self.a, self.b, self.gate, self.state, self.slots, self.slots,
            out=self.out,
        )  # fmt: skip


def steps(step: Step, feed: Callable[[], None], pause: Callable[[], None]) -> None:
    """Some steps in a row, each on new inputs; the results of one are the next one's source."""
    for _ in range(STEPS):
        feed()
        pause()
        step.run()
        pause()
        step.source[-step.out.numel() :] += step.out.view(-1)


@pytest.mark.parametrize("feed", ["work", "elsewhere"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_step_sees_all_that_was_launched_before(feed: str, captured: bool) -> None:
    torch.manual_seed(3)
    step = Step()
    step.run()
    start = [each.clone() for each in (step.source, step.state)]
    made = getattr(step, feed)
    steps(step, made, torch.cuda.synchronize)
    torch.cuda.synchronize()
    want = [each.clone() for each in (step.out, step.state, step.source)]
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            steps(step, made, lambda: None)
    for _ in range(5):
        step.source.copy_(start[0])
        step.state.copy_(start[1])
        step.v.fill_(float("nan"))
        if captured:
            graph.replay()
        else:
            steps(step, made, lambda: None)
        torch.cuda.synchronize()
        for got, wanted in zip((step.out, step.state, step.source), want, strict=True):
            assert torch.equal(got, wanted)
