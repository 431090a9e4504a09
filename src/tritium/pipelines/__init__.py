"""PARTS of a pipeline: which modules are compiled, with what choice, how long they take, and how to put them back."""
