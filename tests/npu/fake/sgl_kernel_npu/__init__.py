"""The vendor's package as far as the adapter knows it: its signatures, its limits and its traps.

Implementations are sequential and for CPU tensors, written from the functions' contracts. What the
vendor's function refuses is refused, and what it gets wrong without an error goes wrong here too.
"""

import torch_npu  # noqa: F401 (as the vendor's package does)
