"""PARTS of a pipeline: find modules to compile, install compiled calls, time them, and undo it all."""
