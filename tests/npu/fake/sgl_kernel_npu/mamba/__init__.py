"""Convolutions and state movement."""
