"""A process of a tensor-parallel group: it runs families, and rank 0 hands over what all gave."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hal.runtime.ranks import ProcessRanks
from support.parallel import Ran, run

Families = dict[str, bool]
"""The families to run, and whether with a verify step."""


def work(rank: int, size: int, meet: str, result: str, families: Families, device: str) -> None:
    """Join the group, run every family, and let rank 0 store the runs of all ranks by family."""
    torch.set_num_threads(1)
    place = f"{device}:{rank}" if device == "cuda" else device
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=size)
    ranks = ProcessRanks()
    gathered: dict[str, list[Ran]] = {}
    for family, verify in families.items():
        own = run(family, place, rank, size, ranks, verify)
        runs: list[Ran | None] = [None] * size
        dist.all_gather_object(runs, own)
        gathered[family] = [each for each in runs if each is not None]
    if rank == 0:
        torch.save(gathered, result)
    dist.barrier()
    dist.destroy_process_group()


def spawn(size: int, folder: str, families: Families, device: str = "cpu") -> dict[str, list[Ran]]:
    """Run families in `size` new processes; every rank's run, by family."""
    context = torch.multiprocessing.get_context("spawn")
    result = f"{folder}/runs.pt"
    processes = [
        context.Process(target=work, args=(rank, size, f"{folder}/meet", result, families, device))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    codes = [process.exitcode for process in processes]
    if codes != [0] * size:
        for process in processes:
            process.kill()
        raise RuntimeError(f"ranks ended with {codes}")
    found: dict[str, list[Ran]] = torch.load(result, weights_only=False)
    return found
