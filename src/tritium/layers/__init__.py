"""Functions for models that are written or ported by hand; the public ones are importable from `tritium`."""
