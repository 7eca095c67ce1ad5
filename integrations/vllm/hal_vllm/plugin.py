"""The entry point: vLLM calls `register` in every one of its processes, maybe more than once.

vLLM goes on without a plugin whose module cannot be imported, and stops at one whose function
raises. So all that could fail is imported by the function.
"""

import importlib


def register() -> None:
    """Take hold of vLLM, or raise: an exception from here stops the engine, as it should."""
    importlib.import_module("hal_vllm.start").register()
