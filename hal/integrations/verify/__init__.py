"""The self-check of a serving engine: does it carry, part and resume the states of a model?

`record` has the data, `prompts` what is asked, `programs` how an engine is asked, `judge` the
verdict. Engines are driven by the `by_…` modules; `launch` runs one in a process of its own.
"""
