"""Triton kernels, one file an op. Importing a module of this folder imports Triton: providers do so when they run."""
