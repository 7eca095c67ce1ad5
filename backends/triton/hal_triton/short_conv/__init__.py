"""The short convolution with both of its gates."""
