"""Triton kernels, one file per op.

Importing a module of this folder imports Triton, so providers import it only when they run.
"""
