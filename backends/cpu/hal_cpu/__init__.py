"""Pure-torch provider of `hal` for the CPU."""
