"""Refusals of arguments, by their names."""

import math
import numbers

import torch
from torch import Tensor


def check_tensor(name: str, value) -> None:
    """Raises TypeError for what is no dense tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, is {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, has the layout {value.layout}")
    if value.is_nested or value.is_quantized:
        raise TypeError(f"{name} must be a dense tensor, is {'nested' if value.is_nested else 'quantized'}")


def check_integers(**values: int) -> None:
    """Raises TypeError with the name of what is no integer."""
    for name, value in values.items():
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, is {type(value).__name__}")


def check_positive(**sizes: int) -> None:
    """Raises TypeError or ValueError with the name of a size that is not a positive integer."""
    check_integers(**sizes)
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}, must be at least 1")


def check_finite(least: float = -math.inf, **values: float) -> None:
    """Raises TypeError or ValueError with the name of what is not a finite number, or is below `least`."""
    for name, value in values.items():
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise TypeError(f"{name} must be a float, is {type(value).__name__}")
        if not math.isfinite(value) or value < least:
            at_least = "" if least == -math.inf else f" and at least {least:g}"
            raise ValueError(f"{name} is {value}, must be finite{at_least}")


def check_limits(**limits: int | None) -> None:
    """The same for what an operator takes as an integer or, where it is None, not at all."""
    for name, limit in limits.items():
        if limit is not None and not isinstance(limit, (int, numbers.Integral, torch.SymInt)):
            raise TypeError(f"{name} must be an int, is {type(limit).__name__}")
        if isinstance(limit, int) and not -(2**63) <= limit < 2**63:
            raise ValueError(f"{name} is {limit}, must have 64 bits")
        if isinstance(limit, int) and limit < 0:
            raise ValueError(f"{name} is {limit}, must be at least 0")
