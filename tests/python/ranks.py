"""Runs a function on several ranks: processes with a gloo group, or with an NCCL group and a CUDA device each; where
there are too few, as hosts that share one.

And what a problem is to each of two ranks.
"""

import dataclasses
import os
import pathlib
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


#: Of the tests.
NUM_RANKS = 2
#: Tokens of rank 0, of all.
SPLITS = {"even": (20, 40), "uneven": (5, 40), "none on rank 0": (0, 40), "none on rank 1": (40, 40), "none": (0, 0)}


class RankFailed(AssertionError):
    pass


#: What a server imports once, for all ranks that it forks. It starts no thread and no group.
_IMPORTED_ONCE = [
    "megamoe",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.auto.modeling_auto",
]


def _context(device):
    """Each rank is a new process. Imports are most of a short one's time, so on the CPU a server makes them once; CUDA
    and NCCL are promised nothing in a forked process."""
    if device == "cuda":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    return context


def _rank_main(function, rank, num_ranks, folder, arguments, device, own_hosts, environment):
    os.environ.clear()
    os.environ.update(environment)  # a server has that of the first test
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.set_default_device("cuda")
    if own_hosts or (device == "cuda" and torch.cuda.device_count() < num_ranks):
        # Hosts that see each other by the loopback network alone. Of each NCCL takes a device once.
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "NCCL_HOSTID": f"host {rank}", "NCCL_SOCKET_IFNAME": "lo"}
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=120),
    )
    try:
        outcome = {"value": function(rank, *arguments)}
    except BaseException:
        outcome = {"traceback": traceback.format_exc()}
    torch.save(outcome, f"{folder}/{rank}.pt")
    if "traceback" in outcome:
        raise SystemExit(1)  # as a user's program would end


def run_ranks(function, num_ranks, folder, *arguments, failing=(), device="cpu", own_hosts=False):
    """[function(rank, *arguments) for each rank], on the CPU. Ranks in `failing` must raise; their value is the
    traceback. With `own_hosts` each is on a host of its own."""
    context = _context(device)
    options = (device, own_hosts, dict(os.environ))
    processes = [
        context.Process(target=_rank_main, args=(function, rank, num_ranks, str(folder), arguments, *options))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(500)
        if process.is_alive():
            process.kill()
    pathlib.Path(folder, "rendezvous").unlink(missing_ok=True)  # another group may meet there
    values = []
    for rank in range(num_ranks):
        outcome = torch.load(f"{folder}/{rank}.pt", weights_only=False, map_location="cpu")
        if ("traceback" in outcome) != (rank in failing):
            raise RankFailed(f"rank {rank}: {outcome.get('traceback', 'did not raise')}")
        values.append(outcome.get("value", outcome.get("traceback")))
    return values


def part_of(problem, split, rank):
    """The problem as this rank sees it: its tokens, its experts."""
    first, _ = split
    tokens = slice(0, first) if rank == 0 else slice(first, None)
    num_local = problem.down.shape[0] // NUM_RANKS
    experts = slice(rank * num_local, (rank + 1) * num_local)
    parts = {name: getattr(problem, name)[tokens] for name in ("x", "expert_ids", "weights", "dy")}
    parts |= {name: getattr(problem, name)[experts] for name in ("gate_up", "down")}
    return dataclasses.replace(problem, **{name: part.detach().clone() for name, part in parts.items()})


def join(parts):
    """Of all ranks: tokens one after the other, experts one after the other."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def joined(values_of_ranks, name):
    return join([found[name] for found in values_of_ranks])


def message_of(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return "no error"
