"""The selective scan: Mamba-2, Mamba-1 and lightning."""
