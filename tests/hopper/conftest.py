"""Host-side tests of the Hopper provider; those that plan launches need Triton's front."""

from importlib.util import find_spec

planned = ["test_prefill.py", "test_tuner.py"]
collect_ignore_glob = [] if find_spec("triton") is not None else planned
