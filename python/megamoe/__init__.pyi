from torch import nn
from torch.distributed import ProcessGroup

from ._groups import check as check
from ._groups import init as init
from ._groups import reserve as reserve
from ._groups import shutdown as shutdown
from ._layer import MoELayer as MoELayer
from ._layer import is_expert_parameter as is_expert_parameter
from ._linear import moe_overlapping_backward_op as moe_overlapping_backward_op
from ._moe import moe as moe
from ._router import Router as Router
from ._router import Routing as Routing

def parallelize_experts(
    model: nn.Module, group: ProcessGroup | None = None, *, overlap_comm: bool = True, num_sms: int | None = None
) -> nn.Module: ...

__version__: str
