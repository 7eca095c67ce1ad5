"""The CPU provider keeps its word: the kit, run as any vendor runs it."""

from hal.testing import ProviderSuite


class TestCpu(ProviderSuite):
    provider = "cpu.torch"
