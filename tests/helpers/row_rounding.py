"""Products that are rounded by their number of rows, as on many processors: last bits show what a sample was computed
beside."""

import importlib.abc
import sys
from importlib.machinery import PathFinder

PRODUCTS = "vllm.model_executor.layers.utils"


def round_by_rows(products) -> None:
    """Change the module ``vllm.model_executor.layers.utils``, before a model is loaded."""
    dispatch = products.dispatch_cpu_unquantized_gemm

    def dispatch_rounded(layer, remove_weight):
        dispatch(layer, remove_weight)
        product = layer.cpu_linear
        layer.cpu_linear = lambda x, weight, bias: product(x, weight, bias) * (1 + len(x) % 61 * 2.0**-21)

    products.dispatch_cpu_unquantized_gemm = dispatch_rounded


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != PRODUCTS:
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
