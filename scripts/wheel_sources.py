"""Python sources inside wheels, parsed and never run: where a name is defined, what members and arguments it has."""

import ast
import functools
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Definition:
    """Where a name is defined: a class, function or assignment in ``module``, or a whole module."""

    module: str
    node: ast.AST


class Library:
    """The packages of some wheels, as if they were installed together.

    Args:
        wheels: by package, the path of its wheel.
    """

    def __init__(self, wheels: Mapping[str, Path]):
        self._archives = {name: zipfile.ZipFile(path) for name, path in wheels.items()}
        self._names = {name: set(archive.namelist()) for name, archive in self._archives.items()}

    @classmethod
    def open(cls, directory: Path, versions: Mapping[str, str]) -> "Library":
        """Open the wheels of these versions.

        Raises:
            SystemExit: one is not in the directory.
        """
        found = {}
        for name, version in versions.items():
            paths = sorted(directory.glob(f"{name}-{version}-*.whl"))
            if not paths:
                raise SystemExit(f"{directory} holds no wheel of {name} {version}: pip download --no-deps gets it")
            found[name] = paths[0]
        return cls(found)

    def find(self, name: str) -> Definition | None:
        """Return where a dotted name leads, through imports and members of classes; None: nowhere."""
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            module = ".".join(parts[:length])
            tree = self.tree(module)
            if tree is not None:
                found: Definition | None = Definition(module, tree)
                for part in parts[length:]:
                    found = self._member(found, part)
                    if found is None:
                        return None
                return found
        return None

    def has_member(self, definition: Definition, name: str) -> bool:
        """Whether a class (or one of its bases), a module, or the class of a variable has an attribute."""
        if isinstance(definition.node, ast.ClassDef):
            return any(name in _own_members(one.node) for one in self._lineage(definition))
        if isinstance(definition.node, ast.Module):
            return self._member(definition, name) is not None
        instance = self._class_of(definition)
        return instance is not None and self.has_member(instance, name)

    def takes(self, definition: Definition, argument: str) -> bool:
        """Whether a function, or the making of a class, takes a keyword argument."""
        node = definition.node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return _takes(node, argument)
        for one in self._lineage(definition):
            makers = [part for part in one.node.body if getattr(part, "name", None) == "__init__"]
            if makers:
                return _takes(makers[0], argument)
        return any(argument in _fields(one.node) for one in self._lineage(definition))

    @functools.cache  # noqa: B019 (one library lives as long as the script)
    def environment_variables(self) -> frozenset[str]:
        """The keys of all dictionaries in the packages' modules ``envs``."""
        keys = set()
        for name in self._archives:
            for node in ast.walk(self.tree(f"{name}.envs") or ast.Module([], [])):
                if isinstance(node, ast.Dict):
                    keys |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        return frozenset(keys)

    def mentions(self, package: str, text: str) -> bool:
        """Whether any Python file of a package holds a text."""
        archive = self._archives[package]
        files = (name for name in self._names[package] if name.endswith(".py"))
        return any(text.encode() in archive.read(name) for name in files)

    def exact_requirements(self, package: str) -> dict[str, str]:
        """Return the packages that a wheel asks for in one version, without extras."""
        metadata = self.text(package, "METADATA")
        found = re.findall(r"^Requires-Dist: ([\w.-]+)==([\w.]+)$", metadata, flags=re.MULTILINE)
        return {name.lower().replace("_", "-"): version for name, version in found}

    def text(self, package: str, name: str) -> str:
        """Return a file of a wheel whose path ends with ``/name``."""
        path = next(path for path in self._names[package] if f"/{path}".endswith(f"/{name}"))
        return self._archives[package].read(path).decode()

    @functools.cache  # noqa: B019
    def tree(self, module: str) -> ast.Module | None:
        """Return the parsed source of a module, None when there is none."""
        package, base = module.split(".")[0], module.replace(".", "/")
        for name in (f"{base}/__init__.py", f"{base}.py"):
            if name in self._names.get(package, ()):
                return ast.parse(self._archives[package].read(name))
        return None

    def _member(self, definition: Definition, name: str) -> Definition | None:
        if isinstance(definition.node, ast.Module):
            return self._in_module(definition.module, name)
        if isinstance(definition.node, ast.ClassDef):
            for one in self._lineage(definition):
                for node in one.node.body:
                    if getattr(node, "name", None) == name:
                        return Definition(one.module, node)
            return None
        instance = self._class_of(definition)
        return None if instance is None else self._member(instance, name)

    def _in_module(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Definition | None:
        tree = self.tree(module)
        if tree is None or (module, name) in seen:
            return None
        for node in _statements(tree.body):
            if getattr(node, "name", None) == name or name in _assigned(node):
                return Definition(module, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        source = self._source(module, node)
                        found = self._in_module(source, alias.name, seen | {(module, name)})
                        return found or self.find(f"{source}.{alias.name}")
            lazy = _lazy_import(node, name)
            if lazy:
                source, _, attribute = lazy.partition(":")
                return self._in_module(module + source if source.startswith(".") else source, attribute)
        inner = self.tree(f"{module}.{name}")
        return None if inner is None else Definition(f"{module}.{name}", inner)

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module
        package, base = module.split(".")[0], module.replace(".", "/")
        is_package = f"{base}/__init__.py" in self._names.get(package, ())
        parts = module.split(".")
        parents = parts[: len(parts) - node.level + is_package]
        return ".".join([*parents, *([node.module] if node.module else [])])

    def _lineage(self, definition: Definition) -> Iterator[Definition]:
        """A class and its bases, as far as they are in the wheels."""
        yield definition
        for base in definition.node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            found = self.find(f"{definition.module}.{ast.unparse(base)}")
            if found is not None and isinstance(found.node, ast.ClassDef):
                yield from self._lineage(found)

    def _class_of(self, definition: Definition) -> Definition | None:
        """The class of a variable that is assigned, or annotated as, an instance of it."""
        node = definition.node
        value = getattr(node, "annotation", None) or getattr(node, "value", None)
        value = value.func if isinstance(value, ast.Call) else value
        if not isinstance(value, (ast.Name, ast.Attribute)):
            return None
        found = self.find(f"{definition.module}.{ast.unparse(value)}")
        return found if found is not None and isinstance(found.node, ast.ClassDef) else None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What runs when a module is loaded, in whatever branch."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody", "handlers"):
            inner = getattr(node, name, None)
            if isinstance(inner, list) and not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _statements(inner)


def _assigned(node: ast.stmt) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _lazy_import(node: ast.stmt, name: str) -> str:
    """Of a table of lazy imports ``{"Name": ".module:Name"}``, where ``name`` is."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
        for key, value in zip(node.value.keys, node.value.values):
            if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                return value.value if ":" in str(value.value) else ""
    return ""


def _own_members(node: ast.ClassDef) -> set[str]:
    """Methods, fields, and what methods assign to ``self``."""
    names = _fields(node) | {part.name for part in node.body if hasattr(part, "name")}
    for part in node.body:
        names |= _assigned(part)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self":
            names.add(inner.attr)
    return names


def _fields(node: ast.ClassDef) -> set[str]:
    return {
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }


def _takes(function: ast.FunctionDef | ast.AsyncFunctionDef, argument: str) -> bool:
    arguments = function.args
    return arguments.kwarg is not None or argument in {one.arg for one in (*arguments.args, *arguments.kwonlyargs)}
