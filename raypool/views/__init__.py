"""What a person sees while it runs."""
