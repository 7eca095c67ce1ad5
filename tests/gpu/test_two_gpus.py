"""Two GPUs over NCCL give what one gives, and a running request moves between them."""

from pathlib import Path

import pytest
import torch

import hal
from hal.runtime.transfer import merge
from hal.sharding import shard_reasons
from support.parallel import CONFIGS, join, layer_of, run, speculation
from support.two_ranks import spawn

pytestmark = pytest.mark.cuda
LIMIT = 1e-5
"""Relative, of float32: sums over ranks and tiles go in another order."""


@pytest.fixture(autouse=True)
def two_devices() -> None:
    """Two GPUs, or no test."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


def served() -> dict[str, bool]:
    """The families that two ranks share and this device serves, and whether with a verify."""
    found = {}
    for family, config in CONFIGS.items():
        if shard_reasons(hal.model.read(config), 2):
            continue
        for verify in (True, False):
            option = speculation(family, verify)
            if hal.explain("cuda", config, dtype="float32", speculative=option).fits:
                found[family] = verify
                break
    return found


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape
    assert float((got - wanted).norm()) <= LIMIT * max(1.0, float(wanted.norm()))


def test_two_gpus_give_the_result_of_one(tmp_path: Path) -> None:
    families = served()
    assert families
    for family, ranks in spawn(2, str(tmp_path), families, "cuda").items():
        whole = run(family, "cuda:0", verify=families[family])
        for step, wanted in enumerate(whole.outputs):
            near(join(layer_of(family), [ran.outputs[step] for ran in ranks]), wanted)
        for slot in whole.states:
            merged = merge([ran.states[slot] for ran in ranks])
            for got, part in zip(merged.segments, whole.states[slot].segments, strict=True):
                assert got.key == part.key
                near(got.values.cpu(), part.values.cpu())
