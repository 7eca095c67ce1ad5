"""The extension module of triton-ascend, empty: nothing here compiles a kernel."""
