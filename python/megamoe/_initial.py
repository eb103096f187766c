"""Initial values of parameters whose rows belong to experts: the same for any number of ranks.

Every row has a stream of random numbers of its own, so that a rank draws those of its experts and no others.
"""

import torch
from torch import Tensor, nn

from ._dtensor import is_dtensor, local_tensor


def _first_local_row(parameter: Tensor) -> int:
    if not is_dtensor(parameter):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if tuple(shape[1:]) != tuple(parameter.shape[1:]):
        raise ValueError(f"a parameter of shape {list(parameter.shape)} is sharded, but not on its expert dimension")
    return offsets[0]


@torch.no_grad()
def draw_normal(parameter: nn.Parameter, seed: int, first_row: int = 0) -> None:
    """Fills [rows, ..., n] with a standard deviation of 1 / sqrt(n); nothing where there is no memory yet.

    Row j gets the stream of the seed ``seed + first_row + j``. Not a hash of both: torch's CPU generator takes 32 bits
    of a seed, in which neighbours differ for certain.
    """
    rows = local_tensor(parameter)
    if rows.device.type == "meta":
        return
    first_row += _first_local_row(parameter)
    generator = torch.Generator(rows.device)
    for index, row in enumerate(rows):
        generator.manual_seed(seed + first_row + index)
        row.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
