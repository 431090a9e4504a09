"""REUSE: cut a graph at repeated blocks, compile each distinct piece once, and call them in order.

1. `segments`   divide a graph into consecutive segments with inputs and outputs
2. `find`       find repeated blocks by the modules that nodes come from, else by the period of the operations
3. `tails`      move the end of a block, behind its last product, into the next piece, where the next norm can fuse with it
4. `obstacles`  return the reason if a cut would change a result
5. `key`        compute keys: pieces with equal keys share compiled code
6. `cut`        choose the level at which the least remains to compile
7. `kept`       keep the pieces that this process has compiled, for later graphs of the same model
8. `stitch`     generate one flat function that calls the compiled pieces
9. `stage`      run all of these as a stage of the pipeline
"""
