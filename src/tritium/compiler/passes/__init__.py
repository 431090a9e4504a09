"""The passes of the backend, one file each, named as in the report."""
