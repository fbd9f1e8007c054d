"""Views of loops and of their results: live displays, figures, reports, and tables."""
