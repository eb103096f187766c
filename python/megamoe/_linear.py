"""The short form: one linear map per expert, experts' outputs averaged."""

import torch
from torch import Tensor

from . import _groups
from ._moe import moe


class _LocalExperts(torch.autograd.Function):
    """This rank's slice of weights that every rank holds whole; their gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx, weights, rank, size, name):
        num_local = weights.shape[0] // size
        ctx.slice = slice(rank * num_local, (rank + 1) * num_local)
        ctx.shape, ctx.name = weights.shape, name
        return weights[ctx.slice].clone()

    @staticmethod
    def backward(ctx, gradient):
        whole = torch.zeros(ctx.shape, dtype=torch.float32, device=gradient.device)
        whole[ctx.slice] = gradient
        whole = torch.ops.megamoe.all_reduce_sum(whole, ctx.name)
        return whole.to(gradient.dtype), None, None, None


def moe_overlapping_backward_op(
    hidden_states: Tensor, weights: Tensor, router_indices: Tensor, overlap_comm: bool = True, group=None
) -> Tensor:
    """One linear map per expert; a token's output is the mean over its slots: y_t = 1/K sum_k x_t @ weights[id_tk].

    It runs as a layer without gate whose second product is the identity, so through the library's plan, exchange and
    products. Collective over the group, as ``megamoe.moe``. On the CPU backend only: the CUDA backend has no kernels
    without gate yet, and refuses the activation by its name.

    Args:
        hidden_states: [..., H] bf16, this rank's tokens.
        weights: [E, H, D] bf16, all experts, the same on every rank; E divisible by the number of ranks. Each rank
            computes with its slice, and every rank gets the whole gradient, summed over the tokens of all ranks.
        router_indices: [..., K] int32 or int64 expert ids; -1 is an empty slot, which counts as 0 in the mean.
        overlap_comm: whether communication runs under computation (the CPU backend has one order).
        group: as in ``megamoe.moe``.

    Returns:
        [..., D] bf16.

    Raises:
        ValueError: weights that aren't [E, H, D] with the H of hidden_states, or E that the ranks don't divide.
        RuntimeError: as ``megamoe.moe``.
    """
    rank, size = _groups.rank_and_size(group)
    if weights.dim() != 3 or weights.shape[1] != hidden_states.shape[-1]:
        raise ValueError(
            f"weights must have shape [E, H, D] with H = {hidden_states.shape[-1]} of hidden_states, "
            f"is {list(weights.shape)}"
        )
    if weights.shape[0] % size:
        raise ValueError(f"weights holds {weights.shape[0]} experts, which {size} ranks do not divide")
    if size > 1:
        weights = _LocalExperts.apply(weights, rank, size, _groups.connected_name(group))
    num_experts, hidden_dim, expert_dim = weights.shape

    # The layer's outputs are as wide as its inputs: the narrower side is filled up with zeros.
    width = max(hidden_dim, expert_dim)
    up = torch.nn.functional.pad(weights.transpose(1, 2), (0, width - hidden_dim))
    x = torch.nn.functional.pad(hidden_states, (0, width - hidden_dim))
    down = torch.eye(width, expert_dim, dtype=weights.dtype, device=weights.device)
    top_k = router_indices.shape[-1]
    y = moe(
        x,
        router_indices,
        torch.full(router_indices.shape, 1 / top_k, device=x.device),
        up.contiguous(),
        down.expand(num_experts, width, expert_dim),
        group,
        overlap_comm,
        activation="identity",
    )
    return y[..., :expert_dim]
