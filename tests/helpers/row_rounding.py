"""Products that are rounded by their number of rows, as on many processors: last bits show what a sample was computed
beside."""

import importlib.abc
import sys
from importlib.machinery import PathFinder

LINEAR = "vllm.model_executor.layers.linear"


def round_by_rows(linear) -> None:
    """Change the module ``vllm.model_executor.layers.linear``."""
    product = linear.UnquantizedLinearMethod.apply

    def rounded(self, layer, x, bias=None):
        return product(self, layer, x, bias) * (1 + len(x) % 61 * 2.0**-21)

    linear.UnquantizedLinearMethod.apply = rounded


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != LINEAR:
            return None
        spec = PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def load_and_change(module) -> None:
            load(module)
            round_by_rows(module)

        spec.loader.exec_module = load_and_change
        return spec


def install() -> None:
    """Change the module as soon as it is loaded."""
    sys.meta_path.insert(0, _Finder())
