"""Expert-parallel groups: from a torch.distributed group to the library's communicator."""

import copy
import enum
import math
import os
import pathlib
import socket
import uuid
import weakref

import torch
import torch.distributed as dist

from ._arguments import check_positive

_ONE_RANK = "one rank"
#: The library's limit (NetworkOptions::host_name).
_MAX_HOST_BYTES = 200
#: The library's limits (CudaHostsOptions).
_MOST = {"network_groups": 8, "network_ctas": 64}
# Name of a group -> the torch group that it was made for. A later group of the same name is another one.
_connected: dict = {}


class _Alone(enum.Enum):
    """Stands for a group of this process alone, whether torch.distributed is initialised or not.

    An enum, for of its own classes torch.compile takes no others as constants; copies and files name its member.
    """

    ALONE = "one rank"


ALONE = _Alone.ALONE


class _NotStored:
    """What is stored for a group, which exists in its process only."""


class OfGroup:
    """A module with a ``group``, which can be neither copied nor stored: copies are of the same, files name none."""

    group = ALONE

    def __getstate__(self) -> dict:
        is_known_elsewhere = self.group is None or self.group is ALONE
        return self.__dict__ | {"group": self.group if is_known_elsewhere else _NotStored()}

    def __copy__(self):
        copied = type(self).__new__(type(self))
        copied.__setstate__(self.__getstate__() | {"group": self.group})
        return copied

    def __deepcopy__(self, memo: dict):
        memo[id(self.group)] = self.group
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__() | {"group": self.group}, memo))
        return copied


def resolve(group):
    """Returns the torch group, or ALONE where there is none."""
    if isinstance(group, _NotStored):
        raise ValueError(
            "the module comes from a file, which does not hold its group: assign one to its attribute group, and to "
            "that of its router"
        )
    if group is not None and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group does not have this process as a rank: torch.distributed.new_group left it out")
    if group is ALONE or isinstance(group, dist.ProcessGroup):
        return group
    if group is not None:
        raise TypeError(f"group must be a torch.distributed.ProcessGroup, is {type(group).__name__}")
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return ALONE


def _name_of(torch_group) -> str:
    return _ONE_RANK if torch_group is ALONE else torch_group.group_name


def rank_and_size(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """This process's rank in the group, and the number of its ranks."""
    torch_group = resolve(group)
    if torch_group is ALONE:
        return 0, 1
    return dist.get_rank(torch_group), dist.get_world_size(torch_group)


def common_seed(group: dist.ProcessGroup | None = None) -> int:
    """A seed from torch's CPU generator: every rank draws one, all get that of rank 0. Collective."""
    seed = [int(torch.randint(2**62, (), device="cpu"))]
    torch_group = resolve(group)
    if rank_and_size(group)[1] > 1:
        dist.broadcast_object_list(seed, group=torch_group, group_src=0)
    return seed[0]


def init(
    group: dist.ProcessGroup | None = None,
    *,
    entry_deadline_s: float = 600.0,
    inner_deadline_s: float = 60.0,
    host: str | None = None,
    rendezvous: str | None = None,
    network_groups: int = 0,
    network_ctas: int = 0,
) -> None:
    """Connects the ranks of a torch.distributed group; collective over the group.

    Not needed for the default deadlines: the first call of a layer on the group connects it.

    Args:
        group: a torch.distributed process group, sub-groups too; None is the default group, or a single rank
            where torch.distributed is not initialised. Its ranks are processes of one host or of several (equally
            many on each, numbered host by host); on CUDA tensors with a device each, which calls on the group use
            from then on. The backend of the torch group does not matter (gloo, NCCL); NCCL's needs
            torch.cuda.set_device first.
        entry_deadline_s: how long a call waits for its peers to make it too, in seconds.
        inner_deadline_s: how long it waits for them after that, in seconds.
        host: ranks that give the same share memory (/dev/shm). None: the machine, and NCCL_HOSTID where that is set.
            Containers that do not share memory need different ones.
        rendezvous: "ADDRESS:PORT" where rank 0 of a group on several hosts listens while the group forms. None:
            MASTER_ADDR, where rank 0 is the first of all processes, else the name of its machine, and a free port.
        network_groups: on CUDA devices of several hosts, the groups of experts that a call is cut into, 1 to 8: one
            is computed while others travel. 0: as the measured network and the layer's sizes suggest. The same on all
            ranks, like network_ctas.
        network_ctas: there, the CTAs, and with them multiprocessors, that transfers between hosts take, 1 to 64. 0: 8.

    Raises:
        TypeError, ValueError: a deadline, host, rendezvous, network_groups or network_ctas of any rank, or of the
            latter two different ones; raised on all.
        RuntimeError: a rank that does not come; hosts with different numbers of ranks, or that are not in order.
    """
    torch_group = resolve(group)
    deadlines = {"entry_deadline_s": entry_deadline_s, "inner_deadline_s": inner_deadline_s}
    over_hosts = {"network_groups": network_groups, "network_ctas": network_ctas}
    if torch_group is ALONE:
        _check_deadlines(deadlines)
        _check_over_hosts(over_hosts)
        name, meeting, rank, size = _ONE_RANK, ("", "", ""), 0, 1
    else:
        name = torch_group.group_name
        rank, size = dist.get_rank(torch_group), dist.get_world_size(torch_group)
        meeting = _agree_on_meeting(torch_group, host or _machine(), rendezvous, deadlines, over_hosts)
    torch.ops.megamoe.make_group(
        name, *meeting, rank, size, entry_deadline_s, inner_deadline_s, network_groups, network_ctas
    )
    _connected[name] = weakref.ref(torch_group)


def _machine() -> str:
    """Its name, its boot id where it has one, for names alone may be equal, and NCCL_HOSTID: what NCCL takes for
    different hosts shares no memory."""
    parts = [socket.gethostname()]
    try:
        parts.append(pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    except OSError:
        pass
    if "NCCL_HOSTID" in os.environ:
        parts.append(os.environb[b"NCCL_HOSTID"].decode(errors="backslashreplace"))
    return " ".join(parts)


def _agree_on_meeting(
    torch_group, host: str, rendezvous: str | None, deadlines: dict, over_hosts: dict
) -> tuple[str, str, str]:
    """How ranks find each other: a name in shared memory on one host; on several a rendezvous, and this rank's host."""
    size = dist.get_world_size(torch_group)
    if size == 1:
        _check_deadlines(deadlines)
        _check_over_hosts(over_hosts)
        return "", "", ""
    mine = (host, f"megamoe-{uuid.uuid4().hex}", rendezvous or _own_rendezvous(torch_group), deadlines, over_hosts)
    everyone = [None] * size
    dist.all_gather_object(everyone, mine, group=torch_group)
    _check_meeting(everyone)
    if len({host for host, *_ in everyone}) == 1:
        return everyone[0][1], "", ""
    return "", everyone[0][2], host


def _check_meeting(everyone: list) -> None:
    """Of all ranks, so that what one of them gave is raised on all: the others would wait for it."""
    for rank, (host, _, rendezvous, deadlines, over_hosts) in enumerate(everyone):
        for name, value in (("host", host), ("rendezvous", rendezvous)):
            if not isinstance(value, str):
                raise TypeError(f"rank {rank}: {name} must be a str, is {type(value).__name__}")
        if len(host.encode()) > _MAX_HOST_BYTES:
            raise ValueError(f"rank {rank}: host has {len(host.encode())} bytes, at most {_MAX_HOST_BYTES} are taken")
        _check_deadlines(deadlines, f"rank {rank}: ")
        _check_over_hosts(over_hosts, f"rank {rank}: ")
    first = everyone[0][-1]
    for rank, (*_, over_hosts) in enumerate(everyone):
        for name, value in over_hosts.items():
            if value != first[name]:
                raise ValueError(f"ranks differ in {name}: rank 0 has {first[name]}, rank {rank} has {value}")


def _check_over_hosts(over_hosts: dict, whose: str = "") -> None:
    for name, value in over_hosts.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{whose}{name} must be an int, is {type(value).__name__}")
        if not 0 <= value <= _MOST[name]:
            raise ValueError(f"{whose}{name} is {value}, must be from 0 to {_MOST[name]}")


def _check_deadlines(deadlines: dict, whose: str = "") -> None:
    for name, seconds in deadlines.items():
        if not isinstance(seconds, (int, float)):
            raise TypeError(f"{whose}{name} must be a number, is {type(seconds).__name__}")
        if not 0 < seconds < math.inf:
            raise ValueError(f"{whose}{name} is {seconds} s, must be positive and finite")


def _own_rendezvous(torch_group) -> str:
    """Where this rank can be reached, if it is the group's first."""
    if dist.get_rank(torch_group) != 0:
        return ""
    is_first_of_all = dist.get_global_rank(torch_group, 0) == 0
    address = os.environ.get("MASTER_ADDR") if is_first_of_all else None
    with socket.create_server(("", 0)) as free:
        return f"{address or socket.gethostname()}:{free.getsockname()[1]}"


def check(group: dist.ProcessGroup | None = None) -> None:
    """Waits for this rank's calls on CUDA devices, of layers and routers, and raises what the devices reported; nothing
    to do on the CPU.

    A device error (an expert id out of range, too many rows, a peer that failed or did not come) is raised on every
    rank (a router's, for logits that are not finite, on its own): by each later call that shares the failed call's
    workspace until ``check`` has raised it once, or by ``check``
    itself. What the failed call should have written is undefined. So call it where results are about to be used for
    good: before a checkpoint is written, or before ``optimizer.step()`` if it may wait for the device. All ranks call
    it at the same point; then the layer is usable again, except after a missed deadline or a peer that left: connect
    anew with ``megamoe.init``.

    Raises:
        RuntimeError: with the library's message.
    """
    torch.ops.megamoe.check(_name_of(resolve(group)))


def reserve(max_tokens: int, group: dist.ProcessGroup | None = None) -> None:
    """Layers on CUDA devices that were not given ``max_tokens`` take at least this many tokens from now on; collective.

    Without it a layer of several ranks takes what its first call needs: the largest T of any rank, rounded up to a
    power of two. It cannot grow by itself later, for ranks do not ask each other in a call. A group of one rank grows.

    Args:
        max_tokens: the largest T of any rank and call; the largest value of all ranks counts.
        group: as in ``megamoe.moe``.

    Raises:
        TypeError, ValueError: max_tokens is no positive integer; on this rank, after the call of all.
    """
    name = connected_name(group)
    try:
        check_positive(max_tokens=max_tokens)
    except (TypeError, ValueError):
        torch.ops.megamoe.reserve(name, 0)  # the peers make their call
        raise
    torch.ops.megamoe.reserve(name, max_tokens)


def shutdown(group: dist.ProcessGroup | None = None) -> None:
    """Leaves the group. Peers that wait for this rank get an error; a later call connects anew."""
    name = _name_of(resolve(group))
    _connected.pop(name, None)
    torch.ops.megamoe.drop_group(name)


# The tracer runs it and keeps the name: a compiled model finds its group connected.
@torch.compiler.assume_constant_result
def connected_name(group: dist.ProcessGroup | None = None) -> str:
    """The name that the operators know the group by; connects it first where needed (collective)."""
    torch_group = resolve(group)
    name = _name_of(torch_group)
    known = _connected.get(name)
    if known is None or known() is not torch_group:
        init(group)
    return name


@torch.compiler.assume_constant_result
def size(group: dist.ProcessGroup | None = None) -> int:
    """The number of the group's ranks."""
    return rank_and_size(group)[1]
