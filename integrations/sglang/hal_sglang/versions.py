"""The SGLang versions that were tested."""

from typing import Final

from hal.integrations.engines.versions import Pin

PIN: Final = Pin("SGLang", "hybrid-hal-sglang", ("0.5.23",), "HAL_SGLANG_ANY_VERSION", ("sglang",))
