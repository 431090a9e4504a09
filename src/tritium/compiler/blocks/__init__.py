"""REUSE: cut a graph at its repeated blocks, compile each distinct piece once, and call the pieces in order.

1. `segments`   consecutive parts of a graph, with what each reads from and gives to the others
2. `find`       where blocks repeat: by the modules that nodes come from, else by the period of the operations
3. `tails`      move the end of a block, behind its last product, into the next piece, where the next norm can fuse with it
4. `obstacles`  why a cut would change a result, if it would
5. `key`        what must be equal for two pieces to share compiled code
6. `cut`        choose the level at which the least remains to compile
7. `kept`       pieces that this process has compiled, for later graphs of the same model
8. `stitch`     one flat function that calls the compiled pieces
9. `stage`      all of it as a stage of the pipeline
"""
