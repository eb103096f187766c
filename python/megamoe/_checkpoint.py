"""Whole models out of models whose experts are spread over ranks, and back; the form that DCP takes."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import _groups
from ._dtensor import is_dtensor
from ._experts import Experts, parameters_of_experts


def _state_of(model: nn.Module) -> tuple[dict, dict[int, Experts]]:
    """The model's state_dict with the parameters themselves, and the Experts of those that are experts', by id.

    By id: wrappers may give the entries other names than the modules have.
    """
    state = model.state_dict(keep_vars=True)
    return state, {id(parameter): experts for _, parameter, experts in parameters_of_experts(model)}


def _is_first(value, experts: Experts | None) -> bool:
    """Whether this rank is the first of all over which the value is spread."""
    if experts is not None and _groups.rank_and_size(experts.group)[0] != 0:
        return False
    return not is_dtensor(value) or not any(value.device_mesh.get_coordinate())


def _gathered(local: Tensor, experts: Experts) -> Tensor | None:
    """The experts of all ranks of the group, on its first rank; one part at a time, so that a device holds only one."""
    rank, num_ranks = _groups.rank_and_size(experts.group)
    if num_ranks == 1:
        return local
    group = _groups.resolve(experts.group)
    local = local.contiguous()
    if dist.get_backend(group) == "gloo":
        local = local.cpu()
    if rank != 0:
        dist.send(local, group=group, group_dst=0)
        return None
    whole = local.new_empty((experts.num_experts, *local.shape[1:]), device="cpu")
    parts = whole.chunk(num_ranks)
    parts[0].copy_(local)
    for peer in range(1, num_ranks):
        part = torch.empty_like(local)
        dist.recv(part, group=group, group_src=peer)
        parts[peer].copy_(part)
    return whole


def _check_part(name: str, value: Tensor, experts: Experts) -> None:
    if value.shape[0] != len(experts.local):
        raise ValueError(
            f"{name} has {value.shape[0]} experts on this rank, must have {len(experts.local)}: "
            f"{experts.num_experts} over the ranks of its group"
        )


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state of the whole model, all experts of all ranks, on the CPU; collective.

    What is spread over ranks is gathered: experts of ``megamoe.MoELayer`` and of ``megamoe.parallelize_experts`` over
    their group, DTensors (FSDP2's) over their mesh. Names and shapes are those of the model on one rank:

        state = megamoe.full_state_dict(model)
        if dist.get_rank() == 0:
            model.save_pretrained(path, state_dict=state)

    Returns:
        What ``state_dict`` returns, with copies on the CPU. On a rank that isn't the first of every group and mesh over
        which the model is spread: nothing, ``{}``.

    Raises:
        ValueError: a parameter that has not the number of experts that its module has on this rank.
    """
    state, experts_of = _state_of(model)
    is_first = all(_is_first(value, experts_of.get(id(value))) for value in state.values())
    whole = {}
    for name, value in state.items():
        experts = experts_of.get(id(value))
        if isinstance(value, Tensor):
            value = value.detach()
        if is_dtensor(value):
            value = value.full_tensor()
        if experts is not None and value.shape[0] != experts.num_experts:  # a DTensor may be of all experts
            _check_part(name, value, experts)
            value = _gathered(value, experts)
        if is_first:
            whole[name] = value.to("cpu", copy=True) if isinstance(value, Tensor) else value
    return whole


def load_full_state_dict(model: nn.Module, state: dict[str, Tensor], strict: bool = True):
    """Loads the state of a whole model, as ``megamoe.full_state_dict`` returns it: each rank takes its experts.

    For any number of ranks, whatever the number that wrote the state. Every rank is given all of it; with
    ``torch.load(path, mmap=True)`` ranks of a host read only what they take. No communication.

    Args:
        model: on this rank; with experts of ``megamoe.MoELayer`` or ``megamoe.parallelize_experts``, or none.
        state: by the names of ``model.state_dict()``.
        strict: as in ``torch.nn.Module.load_state_dict``.

    Returns:
        What ``load_state_dict`` returns: the names that are missing, and those that are unexpected.

    Raises:
        ValueError: experts that are not all of the model's.
    """
    mine, experts_of = _state_of(model)
    state = dict(state)
    for name, target in mine.items():
        if name not in state or not isinstance(target, Tensor):
            continue
        value = state[name]
        experts = experts_of.get(id(target))
        if experts is not None:
            if value.shape[0] != experts.num_experts:
                raise ValueError(
                    f"{name} of the state has {value.shape[0]} experts, the whole model has {experts.num_experts}: "
                    "give what megamoe.full_state_dict returns (load_state_dict loads one rank's state)"
                )
            if target.shape[0] != experts.num_experts:
                value = value[experts.local.start : experts.local.stop]
        if is_dtensor(target):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        state[name] = value
    return model.load_state_dict(state, strict=strict)


def sharded_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The model's state in the form that ``torch.distributed.checkpoint`` (DCP) takes, for saving and loading.

    DCP takes tensors of one name for copies of each other, and keeps one rank's. Here experts are DTensors of all
    ranks' experts, sharded over the group, so that each rank stores its own, and any number of ranks loads them:

        dcp.save(megamoe.sharded_state_dict(model), checkpoint_id=path)
        dcp.load(megamoe.sharded_state_dict(model), checkpoint_id=path)  # into the model's own tensors

    Returns:
        What ``state_dict`` returns, of the same memory.

    Raises:
        NotImplementedError: experts that FSDP2 shards once more, within each rank's; ``full_state_dict`` stores them.
        ValueError: a parameter that has not the number of experts that its module has on this rank.
    """
    state, experts_of = _state_of(model)
    sharded = {}
    for name, value in state.items():
        experts = experts_of.get(id(value))
        if isinstance(value, Tensor):
            value = value.detach()
        if experts is not None and value.shape[0] != experts.num_experts:
            if is_dtensor(value):
                raise NotImplementedError(
                    f"{name} is sharded over the group and by FSDP: store megamoe.full_state_dict, or leave experts to "
                    "the group (fully_shard(..., ignored_params=set(megamoe.expert_parameters(model).values())))"
                )
            _check_part(name, value, experts)
            value = _sharded(value, experts)
        sharded[name] = value
    return sharded


def _sharded(local: Tensor, experts: Experts) -> Tensor:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(_groups.resolve(experts.group), local.device.type)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
