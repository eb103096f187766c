"""Parameters that torch spreads over ranks by itself, as DTensors (FSDP2's, and what distribute_tensor makes)."""

from torch import Tensor


def is_dtensor(value) -> bool:
    return hasattr(value, "to_local")


def local_tensor(parameter: Tensor) -> Tensor:
    """This rank's part of a DTensor; other tensors as they are."""
    return parameter.to_local() if is_dtensor(parameter) else parameter
