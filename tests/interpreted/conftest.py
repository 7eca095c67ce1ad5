"""Kernels in Triton's interpreter: collected only where it is asked for by TRITON_INTERPRET=1."""

import os
from importlib.util import find_spec

asked = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
collect_ignore_glob = [] if asked else ["test_*.py"]

if asked:
    from support import triton_interpreter

    triton_interpreter.apply(fp32_dot="tf32")
