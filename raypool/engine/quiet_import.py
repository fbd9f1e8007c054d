"""Ray imported for the first time, without what it says in a notebook."""

import logging
import warnings


def import_ray() -> None:
    """Import Ray. In a notebook it asks for a package that nobody needs, and so does tqdm, which it imports."""
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        import ray  # noqa: F401
