"""megamoe: expert-parallel Mixture-of-Experts layers for PyTorch."""

from ._groups import init, shutdown
from ._moe import moe

__version__ = "0.1.0"
__all__ = ["init", "moe", "shutdown"]
