"""Attention with an implementation that is chosen by measuring."""
