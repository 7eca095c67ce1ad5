"""The conformance kit: what a vendor runs to show that a provider keeps its word."""
