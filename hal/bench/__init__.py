"""Providers and installed peers timed side by side, each held to the float64 oracle first.

`run.measure` does it for named shapes; `peers` adapts other libraries; `timers` reads the clocks.
Nothing here is imported by a step of an engine.
"""
