"""Stands in for torchvision, whose builds on the package index want torch for CUDA."""

import sys
from enum import Enum
from importlib import import_module

from placeholders import install

__path__: list[str] = []
__version__ = "0.0"


class InterpolationMode(Enum):
    """Names of interpolations, which are read when transforms are imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


install("torchvision")
for _name in ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    import_module(f"torchvision.{_name}")
    vars(sys.modules[f"torchvision.{_name}"])["InterpolationMode"] = InterpolationMode
