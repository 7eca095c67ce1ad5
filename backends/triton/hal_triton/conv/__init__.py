"""The depthwise causal convolution."""
