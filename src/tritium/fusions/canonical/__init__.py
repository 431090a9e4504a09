"""Canonical forms of operations that move elements, of whole operators, and of rotations."""
