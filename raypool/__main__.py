"""`python -m raypool` is the command `raypool`."""

from raypool.cli import main

main(prog_name="raypool")
