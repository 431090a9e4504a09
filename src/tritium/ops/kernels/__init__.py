"""Triton kernels, one file per op. Importing a module of this folder imports Triton: providers do so when they run."""
