from torch import nn
from torch.distributed import ProcessGroup

from ._checkpoint import full_state_dict as full_state_dict
from ._checkpoint import load_full_state_dict as load_full_state_dict
from ._checkpoint import sharded_state_dict as sharded_state_dict
from ._experts import expert_parameters as expert_parameters
from ._experts import is_expert_parameter as is_expert_parameter
from ._groups import check as check
from ._groups import init as init
from ._groups import reserve as reserve
from ._groups import shutdown as shutdown
from ._layer import MoELayer as MoELayer
from ._linear import moe_overlapping_backward_op as moe_overlapping_backward_op
from ._moe import moe as moe
from ._router import Router as Router
from ._router import Routing as Routing

def parallelize_experts(
    model: nn.Module, group: ProcessGroup | None = None, *, overlap_comm: bool = True, num_sms: int | None = None
) -> nn.Module: ...

__version__: str
