"""Drivers of `hal` for models that another library defines."""
