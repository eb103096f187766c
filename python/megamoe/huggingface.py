"""Hugging Face models: `megamoe` as an experts implementation of transformers 5.

    import megamoe.huggingface
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="megamoe")
    megamoe.parallelize_experts(model, group)  # optional: spreads the experts over the ranks of a group

Router, shared experts and losses stay the model's own code.
"""

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers.integrations import moe as transformers_moe

from . import _groups
from ._layer import local_tensor
from ._moe import moe

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


def experts_forward(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward function of transformers' experts modules: [T, H], [T, K], [T, K] -> [T, H]."""
    y = moe(
        hidden_states,
        top_k_index,
        top_k_weights,
        local_tensor(experts.gate_up_proj if experts.has_gate else experts.up_proj),
        local_tensor(experts.down_proj),
        getattr(experts, "megamoe_group", _groups.ALONE),
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

    Every rank calls it on the same model, then feeds its own tokens: the batch is split by rank, and every rank makes
    the same forward and backward calls. Experts' gradients come out as the sum over all ranks' losses; those of all
    other parameters are this rank's own and are reduced by the caller. For the mean over the ranks' losses, divide each
    loss by the number of ranks and sum the gradients of the parameters for which ``megamoe.is_expert_parameter`` is
    false. ``state_dict`` holds this rank's experts only.

    Args:
        model: a transformers model whose experts modules support experts implementations; changed in place.
        group, overlap_comm, num_sms: as in ``megamoe.moe``. Collective.

    Returns:
        The model.

    Raises:
        ValueError: no such module, or experts that the ranks do not divide.
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
        num_experts = experts.down_proj.shape[0]
        if num_experts % num_ranks:
            raise ValueError(
                f"{type(experts).__name__} has {num_experts} experts, which {num_ranks} ranks do not divide"
            )
        num_local = num_experts // num_ranks
        for name in ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj"):
            whole = getattr(experts, name)
            part = whole.detach()[rank * num_local : (rank + 1) * num_local].clone()
            parameter = nn.Parameter(part, requires_grad=whole.requires_grad)
            parameter.is_megamoe_expert = True
            setattr(experts, name, parameter)
        experts.megamoe_group = group
        experts.megamoe_overlap_comm = overlap_comm
        experts.megamoe_num_sms = num_sms
    model.set_experts_implementation("megamoe")
    _groups.connected_name(group)
    return model
