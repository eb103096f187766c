"""The functional form of the layer: fake implementations and autograd of the operators, and moe().

Legend: T tokens of this rank (leading dimensions flattened), K slots, H hidden, I intermediate, e experts of this rank.
"""

import contextlib
import numbers

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import _groups, _library
from ._arguments import check_limits, check_tensor

_library.load()
_ops = torch.ops.megamoe


#: The operator's tensors, by name.
_TENSORS = ("x", "expert_ids", "weights", "gate_up", "down", "gate_up_main_grad", "down_main_grad")
#: What is told to the peers. Others end the program, or are no mistakes: by an exception torch's checkpoint ends a call
#: that it runs again.
_MISTAKES = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def _refuse_other_devices(device, *tensors):
    """The dispatcher gives tensors that have no memory to the fake implementations, also where only some have none."""
    for name, tensor in zip(_TENSORS, tensors):
        if tensor is not None and tensor.device != device:
            raise RuntimeError(f"{name} is on device {tensor.device}; x is on {device}")


@torch.library.register_fake("megamoe::forward")
def _(x, expert_ids, weights, gate_up, down, gate_up_main_grad, down_main_grad, *args):
    _refuse_other_devices(x.device, x, expert_ids, weights, gate_up, down, gate_up_main_grad, down_main_grad)
    return x.new_empty(x.shape), torch.empty(down.shape[:1], dtype=torch.int64, device="cpu")


@torch.library.register_fake("megamoe::backward")
def _(dy, call, x, expert_ids, weights, gate_up, down, *args):
    tensors = (x, weights, gate_up, down)
    return tuple(tensor.new_empty(tensor.shape) for tensor in tensors)


@torch.library.register_fake("megamoe::backward_main_grad")
def _(dy, call, x, expert_ids, weights, *args):
    return x.new_empty(x.shape), weights.new_empty(weights.shape)


@torch.library.register_fake("megamoe::all_reduce_sum")
def _(values, group):
    return values.new_empty(values.shape)


class refused_by_all:
    """What the block raises on this rank is raised on all: this rank then makes its call as one that it refuses.

    The block comes before the operator in which ranks meet, and exchanges nothing itself. An operator that finds a
    mistake tells the peers by itself.

    Args:
        group: as in ``moe``.
        like: a tensor on the device on which peers make the call.
    """

    def __init__(self, group: ProcessGroup | None, like: Tensor):
        self.group, self.like = group, like

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, _MISTAKES) and _groups.size(self.group) > 1:
            device = self.like.device if isinstance(self.like, Tensor) and self.like.is_cuda else "cpu"
            inputs = _absent(5, device)
            _refuse(error, _groups.connected_name(self.group), _ops.forward.default, *inputs, None, None)


class _backward_refused_by_all:
    """The same before the backward operator. `name` is the group's, `device` the call's."""

    def __init__(self, name: str, device: torch.device):
        self.name, self.device = name, device

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, _MISTAKES):
            dy, *inputs = _absent(6, self.device)
            call = torch.empty(0, dtype=torch.int64, device="cpu")
            _refuse(error, self.name, _ops.backward.default, dy, call, *inputs)


def _absent(number: int, device) -> list[Tensor]:
    return [torch.empty(0, 0, device=device)] * number


def _refuse(error: Exception, name: str, operator, *tensors) -> None:
    """Makes a call that the operator refuses on this rank, with the error's text for its peers."""
    # The only text of a caller's that the operator repeats, so the peers' message begins with `activation is "..."`.
    instead_of_activation = f"none: the call failed before: {type(error).__name__}: {error}"
    options = (name, instead_of_activation, 0.0, True, True, 0, 0, 0)
    with contextlib.suppress(RuntimeError), torch.no_grad():
        operator(*tensors, *options)


def refuse_meta(name: str, tensor: Tensor) -> None:
    """Raises RuntimeError for a tensor of the device "meta", where torch has no names for what it cannot do."""
    if tensor.device.type == "meta":
        raise RuntimeError(f"{name} is on device meta, which has no memory to compute with")


def refuse_second_derivatives() -> None:
    """To be called by backward functions, where gradients are enabled for create_graph=True alone."""
    if torch.is_grad_enabled():
        # Not once_differentiable: where dy needs no gradient, that lets the second derivatives be left out.
        raise RuntimeError("megamoe has no second derivatives: call backward or grad without create_graph=True")


class _Forward(torch.autograd.Function):
    """The forward operator with its backward operators.

    Not through torch.library.register_autograd: that reads the operator's schema in every call, which for its 15
    arguments takes longer (0.17 ms) than all else that the host does before the first kernel runs.
    """

    @staticmethod
    def forward(ctx, x, expert_ids, weights, gate_up, down, gate_up_main_grad, down_main_grad, options):
        tensors = (x, expert_ids, weights, gate_up, down, gate_up_main_grad, down_main_grad)
        with torch._C._AutoDispatchBelowAutograd():
            y, call = _ops.forward.default(*tensors, *options)
        ctx.save_for_backward(call, x, expert_ids, weights, gate_up, down)
        # Not saved tensors: the backward calls of other micro-batches add to them in between, and may.
        ctx.main_grads = (gate_up_main_grad, down_main_grad)
        ctx.options, ctx.device = options, x.device
        ctx.has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        ctx.set_materialize_grads(False)  # `call` has none
        return y, call

    @staticmethod
    def backward(ctx, dy, _):
        refused_by_peers = _backward_refused_by_all(ctx.options[0], ctx.device)
        with refused_by_peers:
            refuse_second_derivatives()
        # Hooks may make the forward call again (checkpointing): what they raise, peers may have met in that call.
        with contextlib.nullcontext() if ctx.has_hooks else refused_by_peers:
            call, x, *others = ctx.saved_tensors
        if dy is None:
            dy = torch.zeros_like(x)  # the call is collective: peers make theirs
        gate_up_main_grad, down_main_grad = ctx.main_grads
        if gate_up_main_grad is None:
            dx, dweights, dgate_up, ddown = _ops.backward.default(dy, call, x, *others, *ctx.options)
        else:
            dx, dweights = _ops.backward_main_grad.default(
                dy, call, x, *others, gate_up_main_grad, down_main_grad, *ctx.options
            )
            dgate_up = ddown = None
        return (dx, None, dweights, dgate_up, ddown) + (None,) * 3


def _forward(*inputs):
    if torch.is_grad_enabled():
        return _Forward.apply(*inputs[:7], inputs[7:])
    with torch._C._AutoDispatchBelowAutograd():
        return _ops.forward.default(*inputs)


_registration = torch.library.Library("megamoe", "IMPL")
_registration.impl("forward", _forward, "Autograd")


def moe(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    group: ProcessGroup | None = None,
    overlap_comm: bool = True,
    *,
    activation: str = "swiglu",
    activation_limit: float = 7.0,
    recompute: bool = False,
    max_tokens: int | None = None,
    row_capacity: int | None = None,
    num_sms: int | None = None,
    main_grads: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """One Mixture-of-Experts layer over the ranks of a group: y_t = sum_k w_tk * expert_{id_tk}(x_t).

    Expert j is ``down_j @ (act(gate_j @ x) * (up_j @ x))``. Every call is collective, forward and backward: all ranks
    make it, in the same order, also a rank without tokens (T = 0). The backward call happens when y's gradient is
    known, so y must take part in the loss on every rank or on none. Products accumulate in fp32; results do not depend
    on the number of ranks, on ``overlap_comm`` or on ``recompute``.

    On CUDA tensors a call is enqueued on torch's current stream and the host waits for nothing, except in the first
    call of a configuration, where memory is allocated and ranks agree. H and I must be multiples of 64, the device a
    Hopper GPU.

    Args:
        x: [..., H] bf16; the number of tokens may differ from rank to rank. Other dtypes are refused; under
            ``torch.autocast`` x and the expert weights are cast to its dtype. What isn't a matrix with contiguous
            columns (on CUDA: whose rows are aligned to 16 bytes) is copied.
        expert_ids: [..., K] int32, or int64 (converted after a range check): experts 0 .. R*e - 1 of all ranks; -1 is
            an empty slot. Two slots of a token may name the same expert, and both count. On CUDA the device checks
            them; its message gives -2 or the number of experts for an int64 value that is below or above the range.
        weights: [..., K] float: the slot's weight. Converted to fp32; their gradient flows.
        gate_up: [e, 2I, H] bf16, this rank's experts: gate rows, then up rows. [e, I, H] for activations without gate.
        down: [e, H, I] bf16. Expert weights are read where they lie: columns contiguous (on CUDA rows aligned to 16
            bytes), else refused by name.
        group: a torch.distributed group, whose ranks are processes of one host or several; None is the default group,
            or one rank.
        overlap_comm: whether communication runs under computation (the CPU backend has one order).
        activation: swiglu, clamped_swiglu, gelu_erf, gelu_tanh, or without gate relu2, identity.
        activation_limit: L of clamped_swiglu: silu(min(g, L)) * clamp(u, -L, L).
        recompute: the gate and up products are computed again in the backward pass, not kept.
        max_tokens: the largest T of any rank and call, equal on all ranks; memory is sized by it. None sizes by need;
            on CUDA, where several ranks do not ask each other in a call, by the need of the first call or by
            ``megamoe.reserve``.
        row_capacity: rows (tokens times slots) that a rank can receive in a call; a call that needs more raises on all
            ranks. None: twice max_tokens * K, or once for a single rank.
        num_sms: multiprocessors that the products take on this rank's device, so that other kernels (NCCL's, say) find
            some free; at least 2. None: all of them. The CPU backend has none.
        main_grads: fp32 tensors of the shapes of gate_up and down. The backward pass adds the weight gradients to them,
            and gate_up and down get no ``grad``.

    Returns:
        y, [..., H] bf16, contiguous; 0 for a token whose slots are all empty. A weight gradient is the plain sum over
        the tokens of all ranks: it isn't divided by their number.

    Raises:
        RuntimeError: on every rank of the group, with the message of the rank that found it: a wrong shape, dtype, or
            option by its name, an id out of range with its place, too many rows, a rank that failed or did not come.
            On CUDA a rank raises its own mistakes at once; what the device finds and what other ranks refuse is raised
            by the next call on the group or by ``megamoe.check``.
        TypeError: likewise, on the rank that gave an argument of a wrong type or a sparse tensor.
    """
    name = _groups.connected_name(group)
    options = (activation, activation_limit, not recompute, overlap_comm)
    limits = (max_tokens or 0, row_capacity or 0, num_sms or 0)
    tensors = (x, expert_ids, weights, gate_up, down)
    if torch.compiler.is_compiling():
        # Only the compiler has to see the operator as such: the other way is shorter by one through the dispatcher.
        tensors = _converted(group, *tensors, *_pair_of(main_grads))
        y, _ = _ops.forward.default(*tensors, name, *options, *limits)
        return y
    with refused_by_all(group, down):
        tensors += _pair_of(main_grads)
        _refuse_types(tensors, activation, activation_limit, overlap_comm)
        check_limits(max_tokens=max_tokens, row_capacity=row_capacity, num_sms=num_sms)
        tensors = _converted(group, *tensors)
        _refuse_other_devices(tensors[0].device, *tensors)
    y, _ = _forward(*tensors, name, *options, *limits)
    return y


def _pair_of(main_grads) -> tuple[Tensor | None, Tensor | None]:
    if main_grads is None:
        return None, None
    if not isinstance(main_grads, (tuple, list)) or len(main_grads) != 2:
        raise TypeError("main_grads must be a pair of tensors, for gate_up and for down")
    return tuple(main_grads)


# The dispatcher would refuse these too, but before the operator, where no peer learns of it.


def _refuse_types(tensors, activation, activation_limit, overlap_comm) -> None:
    for name, tensor in zip(_TENSORS, tensors):
        if tensor is None and name.endswith("main_grad"):
            continue
        check_tensor(name, tensor)
    if not isinstance(activation, str):
        raise TypeError(f"activation must be a str, is {type(activation).__name__}")
    if not isinstance(activation_limit, (float, numbers.Real, torch.SymFloat)):
        raise TypeError(f"activation_limit must be a float, is {type(activation_limit).__name__}")
    if not isinstance(overlap_comm, (bool, numbers.Integral)):
        raise TypeError(f"overlap_comm must be a bool, is {type(overlap_comm).__name__}")


def _converted(group, x, expert_ids, weights, gate_up, down, *main_grads):
    """The tensors as the operator takes them."""
    refuse_meta("x", x)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    if weights.is_floating_point():
        weights = weights.to(torch.float32)
    if x.is_cuda and expert_ids.dtype == torch.int64:
        # No truncation, and no host that waits: what is out of range stays so, and the device reports it.
        num_experts = down.shape[0] * _groups.size(group)
        expert_ids = expert_ids.clamp(-2, num_experts).to(torch.int32)
    return x, expert_ids, weights, gate_up, down, *main_grads
