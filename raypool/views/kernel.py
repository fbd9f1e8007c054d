"""The notebook of this process."""

from __future__ import annotations

import sys
from typing import Any


def notebook_shell() -> Any:
    """Return IPython's shell in the kernel of a notebook; None anywhere else."""
    if "IPython" not in sys.modules:  # a kernel has imported it
        return None
    from IPython import get_ipython

    shell: Any = get_ipython()
    return None if getattr(shell, "kernel", None) is None else shell
