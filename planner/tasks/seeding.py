"""Random generators that depend on what is asked for and on nothing else."""

import hashlib

import numpy as np

from sparsekv.planner.tasks.types import Split


def generator(split: Split, task: str, length: int, seed: int, index: int) -> np.random.Generator:
    """A generator of its own for every (split, task, length, seed, index), the same on every machine."""
    name = f"{split.value}/{task}/{length}/{seed}/{index}".encode()
    return np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(name).digest()[:16], "little")))
