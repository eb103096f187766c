"""Which modules hold experts of this rank, and whether what holds their parameters leaves them to the group."""

import dataclasses
import weakref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from . import _groups
from ._dtensor import local_tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Experts:
    """What a module says of the expert parameters that it holds, in its attribute ``megamoe_experts``."""

    names: tuple[str, ...]  #: of its parameters, whose first dimension counts this rank's experts
    local: range  #: this rank's experts
    num_experts: int  #: of all ranks
    group: ProcessGroup | None

    def __deepcopy__(self, memo: dict):
        """A copy of the module is of the same group, which cannot be copied."""
        return self


def modules_with_experts(model: nn.Module):
    """(name, module, its Experts) of each module of the model that holds experts."""
    for name, module in model.named_modules():
        experts = getattr(module, "megamoe_experts", None)
        if experts is not None:
            yield name, module, experts


def parameters_of_experts(model: nn.Module):
    """(name in the model, parameter, its Experts) of each expert parameter."""
    for prefix, module, experts in modules_with_experts(model):
        for name in experts.names:
            parameter = module._parameters.get(name)
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter, experts


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of this rank's experts in a model, by name: what is not to be reduced over the group.

    They are found by the modules that hold them, ``megamoe.MoELayer`` and what ``megamoe.parallelize_experts`` has
    changed. So it does not matter whether the parameters were loaded by assignment, copied or sharded since; ask again
    after that, for the parameters are others.
    """
    return {name: parameter for name, parameter, _ in parameters_of_experts(model)}


def is_expert_parameter(parameter: nn.Parameter) -> bool:
    """Whether the parameter is of this rank's experts, so that its gradient is not to be reduced over the group.

    The mark is the tensor's. What FSDP2 makes of a parameter does not have it; nor has a parameter of a transformers
    model that was copied or loaded by assignment, until the model's next forward pass (none under torch.compile).
    ``megamoe.expert_parameters`` asks the modules, and knows them all.
    """
    return getattr(parameter, "is_megamoe_expert", False)


def mark(parameter: Tensor) -> None:
    parameter.is_megamoe_expert = True


def local_experts(module: nn.Module) -> list[Tensor]:
    """The module's expert parameters, as a call takes them.

    Raises:
        ValueError: they are not this rank's experts, or something else reduces them over ranks of the group.
    """
    experts = module.megamoe_experts
    if not torch.compiler.is_compiling():
        _refuse_reducing_ddp()
    tensors = []
    for name in experts.names:
        parameter = getattr(module, name)
        tensor = local_tensor(parameter)
        if tensor.shape[0] != len(experts.local):
            raise ValueError(
                f"{name} of {type(module).__name__} has {tensor.shape[0]} experts on this rank, must have "
                f"{len(experts.local)}: {experts.num_experts} over the ranks of its group"
            )
        # What FSDP2 puts into a module has no mark the first time.
        if not torch.compiler.is_compiling() and not is_expert_parameter(parameter):
            _refuse_gluing_fsdp(module, name, experts)
            mark(parameter)
        tensors.append(tensor)
    return tensors


def _several_of(group: ProcessGroup | None, ranks) -> bool:
    """Whether more than one of these ranks (of the world) is in the group."""
    if _groups.size(group) == 1:
        return False
    return len(set(dist.get_process_group_ranks(group)) & set(ranks)) > 1


def _refuse_gluing_fsdp(module: nn.Module, name: str, experts: Experts) -> None:
    """FSDP2 takes its ranks' parameters for copies. Of other experts it keeps a piece each, and gathers a mixture."""
    for ranks in _ranks_of_fsdp(module, name):
        if _several_of(experts.group, ranks):
            raise ValueError(
                f"fully_shard spreads {name} of {type(module).__name__} over ranks of the layer's own group, which "
                "hold different experts: shard over a mesh that meets the group in one rank, or call fully_shard(..., "
                "ignored_params=set(megamoe.expert_parameters(model).values())), or give the layer a group of one rank"
            )


def _ranks_of_fsdp(module: nn.Module, name: str):
    """The ranks of each mesh over which fully_shard has spread this parameter."""
    # No public name leads from a parameter in use to its sharded one.
    from torch.distributed._composable_state import _module_state_mapping

    for reference in list(_module_state_mapping.values()):
        parameter_group = getattr(reference(), "_fsdp_param_group", None)
        for sharded in parameter_group.fsdp_params if parameter_group else ():
            info = sharded._module_info
            holders = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names)]
            if any(holder is module and held == name for holder, held in holders):
                yield sharded.mesh_info.mesh.mesh.flatten().tolist()


_accepted_ddp: weakref.WeakSet = weakref.WeakSet()


def _refuse_reducing_ddp() -> None:
    """DistributedDataParallel gives all ranks rank 0's parameters, and the mean of their gradients."""
    ddp = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if ddp is None or ddp in _accepted_ddp:
        return
    reduced = {id(parameter) for parameter in ddp._module_parameters}
    ranks = dist.get_process_group_ranks(ddp.process_group)
    for prefix, module, experts in modules_with_experts(ddp.module):
        if any(id(getattr(module, name)) in reduced for name in experts.names) and _several_of(experts.group, ranks):
            raise ValueError(
                f"DistributedDataParallel has overwritten the experts of {prefix or type(module).__name__} with rank "
                "0's and would reduce their gradients. Before it is made, call "
                "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, "
                "list(megamoe.expert_parameters(model)))"
            )
    _accepted_ddp.add(ddp)
