"""Provider of `hal` for Acme accelerators."""
