"""Attention that chooses by measuring."""
