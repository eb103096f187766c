"""The short form: one linear map per expert, experts' outputs averaged."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from . import _groups
from ._arguments import check_tensor
from ._moe import moe, refused_by_all


class _LocalExperts(torch.autograd.Function):
    """This rank's slice of weights that every rank holds whole; their gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx, weights, rank, size, name, group):
        num_local = weights.shape[0] // size
        ctx.slice = slice(rank * num_local, (rank + 1) * num_local)
        ctx.shape, ctx.name, ctx.group = weights.shape, name, group
        return weights[ctx.slice].clone()

    @staticmethod
    def backward(ctx, gradient):
        # Each rank's part is the sum over all ranks' tokens already.
        if gradient.is_cuda and dist.get_backend(ctx.group) == "nccl":
            whole = gradient.new_empty(ctx.shape)
            dist.all_gather_into_tensor(whole, gradient.contiguous(), group=ctx.group)
            return whole, None, None, None, None
        whole = torch.zeros(ctx.shape, dtype=torch.float32, device="cpu")
        whole[ctx.slice] = gradient.to("cpu", torch.float32)
        whole = torch.ops.megamoe.all_reduce_sum(whole, ctx.name)
        return whole.to(gradient.device, gradient.dtype), None, None, None, None


def _round_up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


def moe_overlapping_backward_op(
    hidden_states: Tensor,
    weights: Tensor,
    router_indices: Tensor,
    overlap_comm: bool = True,
    group: ProcessGroup | None = None,
) -> Tensor:
    """One linear map per expert; a token's output is the mean over its slots: y_t = 1/K sum_k x_t @ weights[id_tk].

    It runs as a layer without gate whose second product is the identity, so through the library's plan, exchange and
    products. Collective over the group, as ``megamoe.moe``.

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
        TypeError, ValueError: what is no dense tensor; weights that aren't [E, H, D] with the H of hidden_states, E that the ranks don't divide, or no
            slots. Other ranks raise a RuntimeError that says so.
        RuntimeError: as ``megamoe.moe``.
    """
    if torch.compiler.is_compiling():
        x, slot_weights, up, down = _as_layer(hidden_states, weights, router_indices, group)
    else:
        with refused_by_all(group, weights):
            x, slot_weights, up, down = _as_layer(hidden_states, weights, router_indices, group)
    y = moe(x, router_indices, slot_weights, up, down, group, overlap_comm, activation="identity")
    return y[..., : weights.shape[-1]]


def _as_layer(hidden_states, weights, router_indices, group):
    """x, weights of the slots, gate_up and down of a layer that computes the same, in its first columns."""
    for name, tensor in {"hidden_states": hidden_states, "weights": weights, "router_indices": router_indices}.items():
        check_tensor(name, tensor)
    rank, size = _groups.rank_and_size(group)
    if weights.dim() != 3 or weights.shape[1] != hidden_states.shape[-1]:
        raise ValueError(
            f"weights must have shape [E, H, D] with H = {hidden_states.shape[-1]} of hidden_states, "
            f"is {list(weights.shape)}"
        )
    if weights.shape[0] % size:
        raise ValueError(f"weights holds {weights.shape[0]} experts, which {size} ranks do not divide")
    if router_indices.dim() == 0 or router_indices.shape[-1] == 0:
        raise ValueError(
            f"router_indices must have shape [..., K] with K of at least 1, is {list(router_indices.shape)}"
        )
    if size > 1:
        weights = _LocalExperts.apply(weights, rank, size, _groups.connected_name(group), group)
    num_experts, hidden_dim, expert_dim = weights.shape

    # The layer's outputs are as wide as its inputs, and the CUDA backend takes multiples of 64: the rest is zeros.
    multiple = 64 if weights.is_cuda else 1
    width = _round_up(max(hidden_dim, expert_dim), multiple)
    inner = _round_up(expert_dim, multiple)
    up = torch.nn.functional.pad(weights.transpose(1, 2), (0, width - hidden_dim, 0, inner - expert_dim))
    x = torch.nn.functional.pad(hidden_states, (0, width - hidden_dim))
    down = torch.eye(width, inner, dtype=weights.dtype, device=weights.device).expand(num_experts, width, inner)
    if weights.is_cuda:
        down = down.contiguous()  # its tensor maps have no expert stride of 0
    slot_weights = torch.full(router_indices.shape, 1 / router_indices.shape[-1], device=x.device)
    return x, slot_weights, up.contiguous(), down
