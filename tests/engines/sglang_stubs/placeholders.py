"""Modules whose names can be imported and whose functions say that they are stubbed."""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Names(type):
    """Lets any public name be read of a placeholder."""

    def __getattr__(cls, name: str) -> Any:
        return placeholder(cls.__module__, f"{cls.__name__}.{name}")


class Placeholder(metaclass=Names):
    """Something that is imported and never used; calling it is an error."""

    def __init__(self, *given: object, **named: object) -> None:
        raise NotImplementedError(f"{type(self).__module__}.{type(self).__name__} is stubbed")


class Stub(ModuleType):
    """A module in which every public name is there."""

    def __getattr__(self, name: str) -> Any:
        made = placeholder(self.__name__, name)
        setattr(self, name, made)
        return made


class Finder(MetaPathFinder, Loader):
    """Finds every module beneath one package."""

    def __init__(self, package: str) -> None:
        self.beneath = package + "."

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = name.startswith(self.beneath)
        return ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def placeholder(owner: str, name: str) -> type[Placeholder]:
    """The placeholder for a public name; a private one is not there."""
    if name.rpartition(".")[2].startswith("_"):
        raise AttributeError(f"{owner} is stubbed and has no {name!r}")
    return Names(name, (Placeholder,), {"__module__": owner})


def install(package: str) -> None:
    """Let every module beneath a package be imported."""
    sys.meta_path.append(Finder(package))
