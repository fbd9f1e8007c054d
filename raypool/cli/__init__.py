"""The command line: what `raypool` does in a terminal."""
