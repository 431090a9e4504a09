"""`python -m tritium`: the command line, where the script is not on the path."""

from tritium.cli import main

main()
