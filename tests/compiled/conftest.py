"""Offline compiles: collected where Triton is installed and does not interpret."""

import os
from importlib.util import find_spec

interprets = os.environ.get("TRITON_INTERPRET") == "1"
able = find_spec("triton") is not None and not interprets
collect_ignore_glob = [] if able else ["test_*.py"]
