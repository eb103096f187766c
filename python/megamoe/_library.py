"""Loads the compiled operators into torch.ops.megamoe."""

from pathlib import Path

import torch

PATH = Path(__file__).parent / "_ops.so"


def load() -> None:
    """Loads the operators. Raises ImportError, saying what is missing."""
    if not PATH.exists():
        raise ImportError(
            f"megamoe: the compiled operators are not at {PATH}. Install the package (pip install .), "
            "or run it from a clone with scripts/python."
        )
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 11):
        raise ImportError(f"megamoe needs PyTorch 2.11 or newer, this is {torch.__version__}")
    try:
        torch.ops.load_library(PATH)
    except OSError as error:
        raise ImportError(
            f"megamoe: {PATH} cannot be loaded: {error} (libhwy.so.1 is Debian's package libhwy1)"
        ) from error
