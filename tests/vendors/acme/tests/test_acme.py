"""Acme's provider keeps its word."""

from hal.testing import ProviderSuite


class TestAcme(ProviderSuite):
    provider = "acme.torch"
    stand_in = "cpu"  # an acme device has no memory of its own: its tensors are the host's
