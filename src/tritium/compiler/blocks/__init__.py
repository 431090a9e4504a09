"""REUSE: cut a graph at repeated blocks, compile each distinct piece once, and call them in order.

1. `segments`  divide a graph into consecutive segments, and stitch their code together again
2. `find`      find repeated blocks by the modules that nodes come from
3. `key`       compute keys: pieces with equal keys share compiled code
4. `cut`       choose the level at which the least remains to compile; decline a cut that would change a result
5. `reuse`     run all of these as a stage of the pipeline, and keep compiled pieces for later graphs of the model
"""
