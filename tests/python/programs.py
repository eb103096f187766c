"""The project's programs that are no part of the package, as modules."""

import importlib.machinery
import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]


def load_program(path):
    name = pathlib.Path(path).stem
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / path))  # also without a suffix
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
