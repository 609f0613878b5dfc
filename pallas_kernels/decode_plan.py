"""What decode attention knows of a step before its first layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax

Array = jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["window", "split_size"])
@dataclass(frozen=True)
class DecodePlan:
    """How the work of a step is shared out, the same for all layers of a window. Made by ``plan_decode`` from the
    lengths of the sequences; what the arrays hold is the implementation's own business."""

    arrays: tuple[Array, ...]
    window: int | None
    split_size: int | None
