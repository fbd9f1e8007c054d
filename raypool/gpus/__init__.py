"""GPUs and processor cores of this machine: what they are, their memory, tensors on them. No pools
here.
"""

from __future__ import annotations
