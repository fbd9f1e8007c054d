"""What a process that runs tasks does around the user's functions."""
