"""Attention that skips blocks of keys."""
