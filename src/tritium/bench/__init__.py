"""Workloads, the way they are run, and the results that are kept."""
