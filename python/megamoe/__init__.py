"""megamoe: expert-parallel Mixture-of-Experts layers for PyTorch.

y = megamoe.moe(x, expert_ids, weights, gate_up, down)        # any router
layer = megamoe.MoELayer(num_experts=64, hidden_dim=1024, expert_dim=512, top_k=4)
"""

from ._checkpoint import full_state_dict, load_full_state_dict, sharded_state_dict
from ._experts import expert_parameters, is_expert_parameter
from ._groups import check, init, reserve, shutdown
from ._layer import MoELayer
from ._linear import moe_overlapping_backward_op
from ._moe import moe
from ._router import Router, Routing


def parallelize_experts(model, group=None, *, overlap_comm=True, num_sms=None):
    """See ``megamoe.huggingface.parallelize_experts``. Needs transformers."""
    from .huggingface import parallelize_experts as parallelize

    return parallelize(model, group, overlap_comm=overlap_comm, num_sms=num_sms)


__version__ = "0.1.0"
__all__ = [
    "MoELayer",
    "Router",
    "Routing",
    "check",
    "expert_parameters",
    "full_state_dict",
    "init",
    "is_expert_parameter",
    "load_full_state_dict",
    "moe",
    "moe_overlapping_backward_op",
    "parallelize_experts",
    "reserve",
    "sharded_state_dict",
    "shutdown",
]
