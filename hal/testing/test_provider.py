"""The kit for one provider: `pytest --pyargs hal.testing --hal-provider NAME`."""

from hal.testing.suite import ProviderSuite


class TestProvider(ProviderSuite):
    """The suite of the provider that the command line names."""
