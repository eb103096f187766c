"""The router's operators: fake implementations and autograd.

Legend: T tokens, E experts of all ranks, K slots.
"""

import torch

from . import _library
from ._moe import refuse_second_derivatives

_library.load()
_ops = torch.ops.megamoe

#: What the operators take on every backend.
MAX_EXPERTS, MAX_SLOTS, MAX_GROUPS = 512, 16, 32


@torch.library.register_fake("megamoe::route")
def _(logits, selection_bias, top_k, *options):
    num_tokens, num_experts = logits.shape
    return (
        logits.new_empty((num_tokens, top_k), dtype=torch.float32),
        logits.new_empty((num_tokens, top_k), dtype=torch.int32),
        logits.new_empty((2 * num_experts + 1,), dtype=torch.float64),
        logits.new_empty((1,), dtype=torch.float32),
    )


@torch.library.register_fake("megamoe::route_backward")
def _(logits, *others):
    return logits.new_empty(logits.shape, dtype=torch.float32)


class _Route(torch.autograd.Function):
    """Not through torch.library.register_autograd: as in _moe.py."""

    @staticmethod
    def forward(ctx, logits, selection_bias, options):
        with torch._C._AutoDispatchBelowAutograd():
            weights, expert_ids, load, loss = _ops.route.default(logits, selection_bias, *options)
        ctx.save_for_backward(logits, expert_ids, load)
        ctx.options = options
        ctx.mark_non_differentiable(expert_ids, load)
        return weights, expert_ids, load, loss

    @staticmethod
    def backward(ctx, d_weights, _, __, d_loss):
        refuse_second_derivatives()
        logits, expert_ids, load = ctx.saved_tensors
        d_logits = _ops.route_backward.default(logits, expert_ids, d_weights.contiguous(), load, d_loss, *ctx.options)
        return d_logits.to(logits.dtype), None, None


def route(logits, selection_bias, *options):
    """logits [T, E] fp32 or bf16 -> weights [T, K] fp32, ids [T, K] int32, load [2E + 1] fp64, loss [1] fp32.

    The load holds the number of slots of each expert, the sum of its scores (of its shares with sigmoid) and T.
    """
    if torch.compiler.is_compiling():
        return _ops.route.default(logits, selection_bias, *options)
    return _route(logits, selection_bias, *options)


def _route(logits, selection_bias, *options):
    if torch.is_grad_enabled():
        return _Route.apply(logits, selection_bias, options)
    with torch._C._AutoDispatchBelowAutograd():
        return _ops.route.default(logits, selection_bias, *options)


_registration = torch.library.Library("megamoe", "IMPL")
_registration.impl("route", _route, "Autograd")
