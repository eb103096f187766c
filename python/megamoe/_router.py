"""The router: from logits to expert ids and weights."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from . import _groups, _route
from ._arguments import check_finite, check_integers, check_positive, check_tensor
from ._initial import draw_normal
from ._moe import refuse_meta


class Routing(NamedTuple):
    """What a router gives for [..., H] inputs."""

    expert_ids: Tensor  #: [..., K] int32
    weights: Tensor  #: [..., K] fp32
    load: Tensor  #: [E] int64, tokens of this rank per expert
    auxiliary_loss: Tensor  #: scalar fp32; alpha * E * sum_j f_j P_j over this rank's tokens


class Router(_groups.OfGroup, nn.Module):
    """A linear router: fp32 logits, softmax or sigmoid scores, top-k with ties to the lower id.

    From the logits on it is the library's router, on the CPU and on CUDA devices: on CUDA a few kernels without a host
    that waits, and gradients that are the same bits in every run. A logit that is NaN or infinite is an error: raised
    by the call on the CPU, by the next call or ``megamoe.check`` on CUDA. More experts than 512, slots than 16 or
    groups than 32, and other devices, take torch operations, also for second derivatives, which the library's router
    refuses. The selection bias stays fp32 when the module is converted to another dtype.

    Args:
        hidden_dim: H.
        num_experts: E, over all ranks.
        top_k: K.
        score_function: "softmax" or "sigmoid" of the logits.
        renormalise: whether a token's K weights are divided by their sum.
        scale: factor on the weights, after that.
        num_groups, top_groups: experts in num_groups equal groups, of which only the top_groups best may be chosen, by
            the sum of their two largest selection scores (DeepSeek-V3, arXiv:2412.19437); the others get -inf.
        bias_update_rate: rate of the selection bias (ibid.): ``update_bias`` moves it up where an expert's load is
            below the mean and down where it is above. 0: no bias.
        aux_loss_alpha: alpha of the load-balancing loss alpha * E * sum_j f_j P_j (Switch Transformers,
            arXiv:2101.03961), f_j the share of slots, P_j the mean score (normalised to sum 1) of expert j.
        group: the ranks that start from the same weights, as in ``megamoe.moe``; construction is then collective over
            it. By default this process alone. ``MoELayer`` gives its own.

    Raises:
        TypeError, ValueError: an option that is wrong, by its name.
    """

    def __init__(
        self,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        *,
        score_function: Literal["softmax", "sigmoid"] = "softmax",
        renormalise: bool = True,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        bias_update_rate: float = 0.0,
        aux_loss_alpha: float = 0.0,
        group: ProcessGroup | None = _groups.ALONE,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_positive(hidden_dim=hidden_dim, num_experts=num_experts, num_groups=num_groups)
        check_integers(top_k=top_k, top_groups=top_groups)
        if score_function not in ("softmax", "sigmoid"):
            raise ValueError(f"score_function is {score_function!r}, must be 'softmax' or 'sigmoid'")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k is {top_k}, must be from 1 to num_experts = {num_experts}")
        if num_experts % num_groups or not 1 <= top_groups <= num_groups:
            raise ValueError(
                f"num_groups = {num_groups} must divide num_experts = {num_experts}, and top_groups = {top_groups} "
                "must be from 1 to num_groups"
            )
        if top_k > top_groups * (num_experts // num_groups):
            raise ValueError(f"top_k = {top_k} is more than the experts of top_groups = {top_groups} groups")
        check_finite(0, scale=scale, bias_update_rate=bias_update_rate, aux_loss_alpha=aux_loss_alpha)
        if scale == 0:
            raise ValueError("scale is 0, must be above it")
        self.num_experts, self.top_k, self.score_function = num_experts, top_k, score_function
        self.renormalise, self.scale = renormalise, scale
        self.num_groups, self.top_groups = num_groups, top_groups
        self.bias_update_rate, self.alpha = bias_update_rate, aux_loss_alpha
        self.group = group
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_dim, device=device, dtype=dtype))
        bias = torch.empty(num_experts, device=device, dtype=torch.float32) if bias_update_rate else None
        self.register_buffer("selection_bias", bias)
        self.reset_parameters()

    def extra_repr(self) -> str:
        return (
            f"hidden_dim={self.weight.shape[-1]}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"score_function={self.score_function!r}"
        )

    def reset_parameters(self) -> None:
        """Draws the weights anew (N(0, 1/H), as ``MoELayer.reset_parameters``), the bias becomes 0. Collective over the
        group."""
        draw_normal(self.weight, _groups.common_seed(self.group))
        if self.selection_bias is not None:
            self.selection_bias.zero_()

    def _apply(self, *args, **kwargs):
        """The bias moves by ``bias_update_rate``, of which bf16 would keep 8 bits: it stays fp32."""
        bias = self.selection_bias
        super()._apply(*args, **kwargs)
        if bias is not None and self.selection_bias.dtype != torch.float32:
            self.selection_bias = bias.to(self.selection_bias.device, torch.float32)
        return self

    def forward(self, x: Tensor) -> Routing:
        """Routes x [..., H]. Gradients flow through weights and auxiliary_loss, never through the choice of experts.

        Raises:
            TypeError: x is no dense tensor.
            RuntimeError: x has another last dimension than the router, or no memory; a logit is NaN or infinite.
        """
        check_tensor("x", x)
        refuse_meta("x", x)
        refuse_meta("the router's weight", self.weight)
        hidden_dim = self.weight.shape[-1]
        if x.dim() == 0 or x.shape[-1] != hidden_dim:
            raise RuntimeError(f"x has shape {list(x.shape)}; its last dimension must be hidden_dim = {hidden_dim}")
        with torch.autocast(x.device.type, enabled=False):
            logits = torch.nn.functional.linear(x.float(), self.weight.float())
            return self._route_in_library(logits) if self._library_takes(logits) else self._route(logits)

    def _library_takes(self, logits: Tensor) -> bool:
        return (
            logits.device.type in ("cpu", "cuda")
            and self.num_experts <= _route.MAX_EXPERTS
            and self.top_k <= _route.MAX_SLOTS
            and self.num_groups <= _route.MAX_GROUPS
        )

    def _route_in_library(self, logits: Tensor) -> Routing:
        weights, ids, load, loss = _route.route(
            logits.reshape(-1, self.num_experts),
            self.selection_bias,
            self.top_k,
            self.score_function,
            self.renormalise,
            self.scale,
            self.num_groups,
            self.top_groups,
            self.alpha,
        )
        shape = (*logits.shape[:-1], self.top_k)
        return Routing(ids.view(shape), weights.view(shape), load[: self.num_experts].long(), loss.squeeze(0))

    def _route(self, logits: Tensor) -> Routing:
        """The same in torch operations."""
        scores = logits.softmax(-1) if self.score_function == "softmax" else logits.sigmoid()
        ids = self._choose(scores.detach())
        weights = scores.gather(-1, ids)
        if self.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        load = torch.zeros(self.num_experts, dtype=torch.int64, device=ids.device)
        load = load.scatter_add(0, ids.flatten(), torch.ones_like(ids.flatten()))
        shares = scores / scores.sum(-1, keepdim=True) if self.score_function == "sigmoid" else scores
        num_tokens = max(1, ids.numel() // self.top_k)
        chosen_share = load.float() / (num_tokens * self.top_k)
        mean_share = shares.reshape(-1, self.num_experts).sum(0) / num_tokens
        loss = self.alpha * self.num_experts * (chosen_share * mean_share).sum()
        return Routing(ids.int(), weights * self.scale, load, loss)

    def _choose(self, scores: Tensor) -> Tensor:
        if self.selection_bias is not None:
            scores = scores + self.selection_bias
        if self.num_groups > 1:
            grouped = scores.unflatten(-1, (self.num_groups, -1))
            group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
            best = _top_k(group_scores, self.top_groups)
            allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, best, True)
            scores = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)
        return _top_k(scores, self.top_k)

    @torch.no_grad()
    def update_bias(self, load: Tensor) -> None:
        """Moves the selection bias by the sign of (mean load - load); load [E] is summed over ranks by the caller."""
        if self.selection_bias is None:
            raise ValueError("the router has no selection bias; give bias_update_rate")
        load = load.float()
        self.selection_bias += self.bias_update_rate * torch.sign(load.mean() - load)


def _top_k(scores: Tensor, k: int) -> Tensor:
    # torch.topk does not say which of equal values it takes; a stable sort takes the lower index.
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
