"""IDENTITY: what decides compiled code, and the files that let the next process start warm.

`digest` has the one list of what decides, `fingerprint` what a file is valid for, `files` saves and loads compile
artifacts, `observations` and `libraries` are the stores next to Inductor's cache.
"""
