"""python -m megamoe info: versions, and what can run here."""

import argparse
import platform

import torch

import megamoe

from . import _library


def info() -> str:
    lines = [
        f"megamoe {megamoe.__version__}, Python {platform.python_version()}, PyTorch {torch.__version__}",
        f"operators: {_library.PATH}",
        f"backend cpu: {torch.ops.megamoe.backend_refusal('cpu') or 'ready'} ({torch.get_num_threads()} threads)",
    ]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            lines.append(
                f"device {index}: {properties.name}, compute capability {properties.major}.{properties.minor}, "
                f"{properties.total_memory / 2**30:.0f} GiB"
            )
    else:
        lines.append("devices: no GPU that PyTorch can use")
    lines.append(torch.ops.megamoe.backend_refusal("cuda") or "backend cuda: ready")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m megamoe", description=__doc__)
    parser.add_argument("command", choices=["info"], help="info: versions, and what can run here")
    parser.parse_args()
    print(info())


if __name__ == "__main__":
    main()
