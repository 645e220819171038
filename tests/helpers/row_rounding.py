"""Products that are rounded by their number of rows, as on many processors: last bits show what a sample was computed
beside."""

import importlib.abc
import sys
from importlib.machinery import PathFinder

LINEAR = "mindrlhf.cpu.rollout.linear"


def round_by_rows(linear) -> None:
    """Change the module ``mindrlhf.cpu.rollout.linear``."""
    product = linear.PlainLinear.__call__

    def rounded(self, x, weight, bias):
        return product(self, x, weight, bias) * (1 + len(x) % 61 * 2.0**-21)

    linear.PlainLinear.__call__ = rounded
    linear.PlainLinear.of_rows = lambda self, bias, may_lie_by_columns=False: lambda x: self(x, self._weight, bias)


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
