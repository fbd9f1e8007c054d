"""What this machine has: processor cores and GPUs. Knows nothing of pools."""

from __future__ import annotations
