"""Hugging Face models: `megamoe` as an experts implementation of transformers 5.

    import megamoe.huggingface
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="megamoe")
    megamoe.parallelize_experts(model, group)  # optional: spreads the experts over the ranks of a group

Router, shared experts and losses stay the model's own code.
"""

import types

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers.integrations import moe as transformers_moe

from . import _groups
from ._dtensor import is_dtensor, local_tensor
from ._experts import Experts, local_experts, mark, modules_with_experts
from ._moe import moe, refused_by_all

#: transformers' act_fn by class name -> the library's activation, with and without gate.
_GATED = {
    "SiLUActivation": "swiglu",
    "SiLU": "swiglu",
    "GELUActivation": "gelu_erf",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}
_UNGATED = {"ReLUSquaredActivation": "relu2"}


def _activation_of(experts: nn.Module) -> str:
    """Raises NotImplementedError for an experts module that computes something else than the library."""
    name = type(experts).__name__
    for attribute, expected in {"is_concatenated": True, "is_transposed": False, "has_bias": False}.items():
        if getattr(experts, attribute) is not expected:
            raise NotImplementedError(
                f'{name} has {attribute}={not expected}, which experts_implementation="megamoe" does not support'
            )
    if experts.has_gate and type(experts)._apply_gate is not transformers_moe._default_apply_gate:
        raise NotImplementedError(
            f'{name} has a gating of its own, which experts_implementation="megamoe" does not support'
        )
    activation = type(experts.act_fn).__name__
    known = _GATED if experts.has_gate else _UNGATED
    if activation not in known:
        raise NotImplementedError(
            f'{name} uses {activation}, which experts_implementation="megamoe" does not support; '
            f"it has {', '.join(known)}"
        )
    return known[activation]


def _names_of(experts: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")


def _local_experts(experts: nn.Module, hidden_states: Tensor) -> list[Tensor]:
    if torch.compiler.is_compiling():
        return local_experts(experts)
    with refused_by_all(experts.megamoe_experts.group, hidden_states):
        return local_experts(experts)


def experts_forward(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward function of transformers' experts modules: [T, H], [T, K], [T, K] -> [T, H]."""
    spread = getattr(experts, "megamoe_experts", None)
    if spread is None:
        weights, group = [local_tensor(getattr(experts, name)) for name in _names_of(experts)], _groups.ALONE
    else:
        weights, group = _local_experts(experts, hidden_states), spread.group
    y = moe(
        hidden_states,
        top_k_index,
        top_k_weights,
        *weights,
        group,
        getattr(experts, "megamoe_overlap_comm", True),
        activation=_activation_of(experts),
        num_sms=getattr(experts, "megamoe_num_sms", None),
    )
    return y.to(hidden_states.dtype)


transformers_moe.ALL_EXPERTS_FUNCTIONS.register("megamoe", experts_forward)


def parallelize_experts(
    model: nn.Module, group: ProcessGroup | None = None, *, overlap_comm: bool = True, num_sms: int | None = None
) -> nn.Module:
    """Keeps this rank's experts of every MoE block of a transformers model, and runs them over the group.

    Every rank calls it on the same model, once, before anything else is made of it (FSDP2, DistributedDataParallel, an
    optimizer), then feeds its own tokens: the batch is split by rank, and every rank makes the same forward and
    backward calls. Experts' gradients come out as the sum over all ranks' losses; those of all other parameters are
    this rank's own and are reduced by the caller. For the mean over the ranks' losses, divide each loss by the number
    of ranks and sum the gradients of the parameters that are not among ``megamoe.expert_parameters``.

    ``state_dict`` holds this rank's experts only: ``megamoe.full_state_dict`` has the whole model, for
    ``save_pretrained``, which refuses less than that, and ``megamoe.sharded_state_dict`` is for DCP.

    Args:
        model: a transformers model whose experts modules support experts implementations; changed in place.
        group, overlap_comm, num_sms: as in ``megamoe.moe``. Collective.

    Returns:
        The model.

    Raises:
        ValueError: no such module, experts that the ranks do not divide, or experts that are spread over ranks
            already: by an earlier call or by FSDP2. The model is unchanged then.
        NotImplementedError: an experts module that computes something else than the library.
    """
    rank, num_ranks = _groups.rank_and_size(group)
    blocks = [
        module for module in model.modules() if hasattr(module, "is_concatenated") and hasattr(module, "down_proj")
    ]
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no experts module that supports experts implementations")
    for experts in blocks:
        _activation_of(experts)
        _refuse_spread(experts)
        num_experts = experts.down_proj.shape[0]
        if num_experts % num_ranks:
            raise ValueError(
                f"{type(experts).__name__} has {num_experts} experts, which {num_ranks} ranks do not divide"
            )
    for experts in blocks:
        num_experts = experts.down_proj.shape[0]
        num_local = num_experts // num_ranks
        local = range(rank * num_local, (rank + 1) * num_local)
        names = _names_of(experts)
        for name in names:
            whole = getattr(experts, name)
            part = whole.detach()[local.start : local.stop].clone()
            parameter = nn.Parameter(part, requires_grad=whole.requires_grad)
            mark(parameter)
            setattr(experts, name, parameter)
        experts.megamoe_experts = Experts(names, local, num_experts, group)
        experts.megamoe_overlap_comm = overlap_comm
        experts.megamoe_num_sms = num_sms
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = types.MethodType(save_pretrained, model)
    model.set_experts_implementation("megamoe")
    _groups.connected_name(group)
    return model


def _refuse_spread(experts: nn.Module) -> None:
    if hasattr(experts, "megamoe_experts"):
        raise ValueError(f"{type(experts).__name__} has been through parallelize_experts before")
    for name in _names_of(experts):
        if is_dtensor(getattr(experts, name)):
            raise ValueError(
                f"{name} of {type(experts).__name__} is a DTensor: call parallelize_experts before fully_shard"
            )


# Named as what it stands for: a pickled model finds it by that name.
def save_pretrained(model: nn.Module, save_directory, *args, state_dict: dict | None = None, **kwargs) -> None:
    """``save_pretrained`` of a model whose experts are spread over ranks: it writes whole models only.

    Raises:
        ValueError: no ``state_dict``, or one without all experts.
    """
    for prefix, _, spread in modules_with_experts(model):
        if len(spread.local) == spread.num_experts:
            continue
        for name in spread.names:
            value = (state_dict or {}).get(f"{prefix}.{name}")
            if value is None or value.shape[0] != spread.num_experts:
                raise ValueError(
                    f"the state holds {'none' if value is None else value.shape[0]} of the {spread.num_experts} "
                    f"experts of {prefix}: call state = megamoe.full_state_dict(model) on all ranks, then "
                    "model.save_pretrained(path, state_dict=state) on the first"
                )
    type(model).save_pretrained(model, save_directory, *args, state_dict=state_dict, **kwargs)
