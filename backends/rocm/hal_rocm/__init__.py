"""AMD provider of `hal`."""
