"""Runs the weights of Hugging Face transformers through `hal`, one model instance at a time.

`open_folder` decides before a weight is loaded, `load` gives a `Runner`, and `Engine` serves
requests on it with continuous batching.
"""

from hal.integrations.transformers.engine import Engine
from hal.integrations.transformers.families import DRIVEN, Undriven
from hal.integrations.transformers.loading import Folder, load, load_weights, open_folder
from hal.integrations.transformers.runner import Runner

__all__ = [
    "DRIVEN",
    "Engine",
    "Folder",
    "Runner",
    "Undriven",
    "load",
    "load_weights",
    "open_folder",
]
