"""Host-side tests of the Hopper provider; those that plan launches need Triton's front."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") is not None else ["test_prefill.py"]
