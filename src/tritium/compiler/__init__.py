"""FLOW: compile a graph from Dynamo into a callable. `pipeline.py` is the ordered list of stages."""
