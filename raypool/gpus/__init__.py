"""GPUs and processor cores of this machine, their memory, and tensors on them. No pools here."""

from __future__ import annotations
