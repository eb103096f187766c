"""The layer as a module: router and experts."""

import warnings

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from . import _groups
from ._arguments import check_finite, check_limits, check_positive
from ._dtensor import local_tensor
from ._experts import Experts, local_experts, mark
from ._initial import draw_normal
from ._moe import moe, refused_by_all
from ._router import Router

_EXPERTS = ("gate_up", "down")
_GATED = ("swiglu", "clamped_swiglu", "gelu_erf", "gelu_tanh")
_UNGATED = ("relu2", "identity")


class MoELayer(_groups.OfGroup, nn.Module):
    """A Mixture-of-Experts layer whose experts are spread over a group of ranks.

    Parameters: ``router.weight`` [E, H], the same on all ranks (its gradient is this rank's: reduce it as any
    replicated parameter), ``gate_up`` [e, 2I, H] (gate rows, then up rows; [e, I, H] for activations without gate) and
    ``down`` [e, H, I] of this rank's experts ``rank * e ... (rank + 1) * e - 1``, e = E / ranks. Experts' gradients are
    the sum over the tokens of all ranks and must not be reduced again within the group;
    ``megamoe.expert_parameters`` tells them apart. A parameter with an fp32 attribute ``main_grad`` (both experts'
    parameters, or none; a frozen one, which gets no gradient, does not count) gets its gradient added there, and no
    ``grad``. FSDP2 may shard the parameters on the expert dimension, over a mesh that meets the group in one rank.

    Parameters start as N(0, 1/n), n their last size, as ``reset_parameters`` says: from torch's seed on rank 0 of the
    group, whatever the seeds of others are, so that R ranks hold the very layer that one rank would make. Layers in
    several groups (of data parallelism, say) start alike where the seeds of their first ranks do.

    ``torch.save`` stores no group that was given: assign ``layer.group`` and ``layer.router.group`` after loading.

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
        TypeError, ValueError: an option that is wrong, by its name.
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
        if "dtype" in router_options:
            raise TypeError("MoELayer takes no dtype: its parameters are bf16")
        check_positive(num_experts=num_experts, hidden_dim=hidden_dim, expert_dim=expert_dim)
        check_finite(activation_limit=activation_limit)
        check_limits(max_tokens=max_tokens, row_capacity=row_capacity, num_sms=num_sms)
        rank, num_ranks = _groups.rank_and_size(group)
        if num_experts % num_ranks:
            raise ValueError(f"num_experts is {num_experts}, must be divisible by the {num_ranks} ranks of the group")
        if activation not in _GATED + _UNGATED:
            raise ValueError(f"activation is {activation!r}, must be one of {', '.join(_GATED + _UNGATED)}")
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
        _groups.connected_name(group)
        options = {"device": device, "dtype": torch.bfloat16}
        self.router = Router(hidden_dim, num_experts, top_k, group=group, **options, **router_options)
        rows = expert_dim if activation in _UNGATED else 2 * expert_dim
        self.gate_up = nn.Parameter(torch.empty(num_local, rows, hidden_dim, **options))
        self.down = nn.Parameter(torch.empty(num_local, hidden_dim, expert_dim, **options))
        self._draw_experts()
        self.load: Tensor | None = None  #: [E] int64: tokens of this rank per expert in the last call
        self.auxiliary_loss: Tensor | None = None  #: of the last call, to be added to the loss

    def reset_parameters(self) -> None:
        """Draws router and experts anew; collective. To be called after ``to_empty`` of a layer made on "meta".

        Rank 0's generator of torch on the CPU (``torch.manual_seed``) gives one seed for the router and one for the
        experts; every rank takes two numbers from its own. Each row of the router and each expert's matrix has a
        stream of its own. Values depend on the device's type, for torch's generators do.
        """
        self.router.reset_parameters()
        self._draw_experts()

    def _draw_experts(self) -> None:
        seed = _groups.common_seed(self.group)
        draw_normal(self.gate_up, seed, self.local_experts.start)
        draw_normal(self.down, seed, self.router.num_experts + self.local_experts.start)

    @property
    def megamoe_experts(self) -> Experts:
        return Experts(_EXPERTS, self.local_experts, self.router.num_experts, self.group)

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
                mark(self._parameters[name])

    def __getstate__(self) -> dict:
        """Without what the last call left: its graph can neither be copied nor stored."""
        return super().__getstate__() | {"load": None, "auxiliary_loss": None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._mark_experts()

    def extra_repr(self) -> str:
        num_local, _, hidden_dim = self.gate_up.shape
        return (
            f"experts {self.local_experts.start}..{self.local_experts.stop - 1} of {self.router.num_experts}, "
            f"hidden_dim={hidden_dim}, expert_dim={self.down.shape[-1]}, top_k={self.router.top_k}"
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] bf16 -> [..., H] bf16; collective. Sets ``load`` and ``auxiliary_loss``.

        Under reentrant checkpointing (``use_reentrant=True``) the latter has no graph, and adding it to the loss
        changes no gradient: return it from the checkpointed function beside y, or take the other kind. The call that
        runs again warns of it.

        Raises:
            RuntimeError: as ``megamoe.moe``, on every rank; from the router too.
            ValueError: parameters that FSDP2 or DistributedDataParallel mixes over ranks of the group.
        """
        if torch.compiler.is_compiling():
            routing, experts = self.router(x), local_experts(self)
        else:
            self._warn_of_a_lost_loss()
            with refused_by_all(self.group, local_tensor(self.down)):
                routing, experts = self.router(x), local_experts(self)
        self.load, self.auxiliary_loss = routing.load, routing.auxiliary_loss
        return moe(
            x,
            routing.expert_ids,
            routing.weights,
            *experts,
            self.group,
            main_grads=self._main_grads(),
            **self.options,
        )

    def _main_grads(self) -> tuple[Tensor | None, Tensor | None] | None:
        """What the backward call adds to; for a frozen parameter beside another with main_grad, what nobody reads."""
        experts = (self.gate_up, self.down)
        found = [getattr(parameter, "main_grad", None) if parameter.requires_grad else None for parameter in experts]
        if all(main_grad is None for main_grad in found):
            return None
        return tuple(
            main_grad if parameter.requires_grad else torch.empty_like(local_tensor(parameter), dtype=torch.float32)
            for parameter, main_grad in zip(experts, found)
        )

    def _warn_of_a_lost_loss(self) -> None:
        """In the call that reentrant checkpointing makes again: the loss of the first, made without gradients, has got
        none since, as it would have by being returned."""
        lost = self.auxiliary_loss
        if not getattr(self.router, "alpha", 0) or lost is None or lost.requires_grad or not torch.is_grad_enabled():
            return
        is_in_backward = torch._C._current_graph_task_id() != -1
        # The other kind of checkpointing catches what is saved in the call, and had gradients in the first.
        if is_in_backward and torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            warnings.warn(
                "MoELayer.auxiliary_loss has no gradient in reentrant checkpointing: use checkpoint(..., "
                "use_reentrant=False), or return it from the checkpointed function",
                stacklevel=2,
            )
