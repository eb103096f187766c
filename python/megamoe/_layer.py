"""The layer as a module: router and experts."""

import copy

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from . import _groups
from ._moe import moe
from ._router import Router

_EXPERTS = ("gate_up", "down")


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer whose experts are spread over a group of ranks.

    Parameters: ``router.weight`` [E, H], the same on all ranks (its gradient is this rank's: reduce it as any
    replicated parameter), ``gate_up`` [e, 2I, H] (gate rows, then up rows; [e, I, H] for activations without gate) and
    ``down`` [e, H, I] of this rank's experts ``rank * e ... (rank + 1) * e - 1``, e = E / ranks. Experts' gradients are
    the sum over the tokens of all ranks and must not be reduced again within the group;
    ``megamoe.is_expert_parameter`` tells them apart. A parameter with an fp32 attribute ``main_grad`` (both experts'
    parameters, or none) gets its gradient added there, and no ``grad``. FSDP2 may shard the parameters on the expert
    dimension.

    Args:
        num_experts: E, over all ranks; divisible by their number.
        hidden_dim: H.
        expert_dim: I.
        top_k: K, experts per token.
        group: a torch.distributed group; None is the default group, or one rank. Construction is collective.
        activation, activation_limit, recompute, max_tokens, row_capacity, num_sms: as in ``megamoe.moe``.
        overlap_comm: likewise.
        device: of the parameters.
        **router_options: of ``megamoe.Router``: score_function, renormalise, scale, num_groups, ...

    Raises:
        ValueError: an option that is wrong, by its name.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_dim: int,
        expert_dim: int,
        top_k: int,
        *,
        group: ProcessGroup | None = None,
        overlap_comm: bool = True,
        activation: str = "swiglu",
        activation_limit: float = 7.0,
        recompute: bool = False,
        max_tokens: int | None = None,
        row_capacity: int | None = None,
        num_sms: int | None = None,
        device: torch.device | None = None,
        **router_options,
    ):
        super().__init__()
        rank, num_ranks = _groups.rank_and_size(group)
        if num_experts % num_ranks:
            raise ValueError(f"num_experts is {num_experts}, must be divisible by the {num_ranks} ranks of the group")
        num_local = num_experts // num_ranks
        self.local_experts = range(rank * num_local, (rank + 1) * num_local)
        self.group = group
        self.options = {
            "overlap_comm": overlap_comm,
            "activation": activation,
            "activation_limit": activation_limit,
            "recompute": recompute,
            "max_tokens": max_tokens,
            "row_capacity": row_capacity,
            "num_sms": num_sms,
        }
        self.router = Router(hidden_dim, num_experts, top_k, device=device, dtype=torch.bfloat16, **router_options)
        rows = expert_dim if activation in ("relu2", "identity") else 2 * expert_dim
        options = {"device": device, "dtype": torch.bfloat16}
        self.gate_up = nn.Parameter(torch.empty(num_local, rows, hidden_dim, **options))
        self.down = nn.Parameter(torch.empty(num_local, hidden_dim, expert_dim, **options))
        for parameter in (self.gate_up, self.down):
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        self.load: Tensor | None = None  #: [E] int64: tokens of this rank per expert in the last call
        self.auxiliary_loss: Tensor | None = None  #: of the last call, to be added to the loss
        _groups.connected_name(group)

    # What makes parameters anew takes the mark of is_expert_parameter from them: assignment,
    # load_state_dict(assign=True), to_empty() from the meta device, copies.

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark_experts()

    def _apply(self, *args, **kwargs):
        super()._apply(*args, **kwargs)
        self._mark_experts()
        return self

    def _mark_experts(self) -> None:
        for name in _EXPERTS:
            if self._parameters.get(name) is not None:
                self._parameters[name].is_megamoe_expert = True

    def __getstate__(self) -> dict:
        """Without what the last call left: its graph can neither be copied nor stored."""
        return super().__getstate__() | {"load": None, "auxiliary_loss": None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._mark_experts()

    def __deepcopy__(self, memo: dict):
        """The copy is of the same group, which cannot be copied."""
        memo[id(self.group)] = self.group
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def extra_repr(self) -> str:
        num_local, _, hidden_dim = self.gate_up.shape
        return (
            f"experts {self.local_experts.start}..{self.local_experts.stop - 1} of {self.router.num_experts}, "
            f"hidden_dim={hidden_dim}, expert_dim={self.down.shape[-1]}, top_k={self.router.top_k}"
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] bf16 -> [..., H] bf16; collective. Sets ``load`` and ``auxiliary_loss``."""
        routing = self.router(x)
        self.load, self.auxiliary_loss = routing.load, routing.auxiliary_loss
        main_grads = [getattr(parameter, "main_grad", None) for parameter in (self.gate_up, self.down)]
        return moe(
            x,
            routing.expert_ids,
            routing.weights,
            local_tensor(self.gate_up),
            local_tensor(self.down),
            self.group,
            main_grads=None if all(main_grad is None for main_grad in main_grads) else tuple(main_grads),
            **self.options,
        )


def local_tensor(parameter: Tensor) -> Tensor:
    """This rank's part of a DTensor; other tensors as they are."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def is_expert_parameter(parameter: nn.Parameter) -> bool:
    """Whether the parameter is of this rank's experts, so that its gradient is not to be reduced over the group.

    What FSDP2 makes of a parameter, and a copy of a transformers model's, does not know it any more: ask before.
    """
    return getattr(parameter, "is_megamoe_expert", False)
