"""`python -m raypool` is the command `raypool`."""

from raypool.cli.main import main

main(prog_name="raypool")
