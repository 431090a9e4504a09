"""FLOW: a graph from Dynamo comes in, a compiled callable goes out. `pipeline.py` is the ordered list of what happens."""
