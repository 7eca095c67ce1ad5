"""The files that `hal new-provider` writes, with their fields in braces."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

PROJECT: Final = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{project}"
version = "0.1.0"
description = "hal on {device}"
requires-python = ">=3.11"
dependencies = ["hybrid-hal>=0.1,<0.2"]

[project.optional-dependencies]
runtime = ["torch>=2.11"]

[project.entry-points."hal.providers"]
"{name}" = "{package}.plugin"

[tool.setuptools.packages.find]
include = ["{package}", "{package}.*"]
"""

PLUGIN: Final = '''\
"""Manifest of {name}: data alone, without torch and the vendor's libraries."""

from hal_registry import API, Manifest, hookimpl

MANIFEST = Manifest(
    name="{name}",
    device="{device}",
    api=API,
    load="{package}.provider:{Device}Provider",
    needs=("torch>=2.11",),
    offers={{}},
)


@hookimpl
def hal_providers() -> list[Manifest]:
    """The one provider of this distribution."""
    return [MANIFEST]
'''

PROVIDER: Final = '''\
"""The provider of {device}; imported only after its manifest has won."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hal.interfaces import Scratch


class {Device}Provider:
    """Serves what the manifest offers; an interface that it does not offer is None."""

    def __init__(self, device: str, options: Mapping[str, object]) -> None:
        self.device = device
        self.conv = None
        self.delta_rule = None
        self.scan = None
        self.conv_state = None

    def prepare(self, params: Mapping[str, Tensor | None]) -> Mapping[str, Tensor | None]:
        """Lay a layer's weights out once, at bind; the same names come back."""
        return params

    def scratch_spec(
        self, interface: str, shapes: Mapping[str, Sequence[int]], max_batch: int, width: int
    ) -> Sequence[Scratch]:
        """The tensors that verify leaves for commit."""
        return ()

    def warmup(self) -> None:
        """Compile all that can be launched."""
'''

TEST: Final = '''\
"""{name} keeps its word."""

from hal.testing import ProviderSuite


class Test{Device}(ProviderSuite):
    provider = "{name}"
'''

FILES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "pyproject.toml": PROJECT,
        "{package}/__init__.py": '"""Provider of hal for {device}."""\n',
        "{package}/plugin.py": PLUGIN,
        "{package}/provider.py": PROVIDER,
        "tests/test_{device}_{flavour}.py": TEST,
    }
)
"""Templates by path; paths have the same fields."""
