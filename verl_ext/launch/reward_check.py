"""What the stages that learn from rewards have in common, of what can be refused before torchrun starts."""

from __future__ import annotations

import math

CHOICES: dict[str, tuple[str, ...]] = {"data.eval_split": ("test", "train")}
RANGES = {  # lowest and highest value allowed
    "data.eval_batches": (-1, math.inf),
    "algorithm.dynamic_sampling.max_rounds": (0, math.inf),
    "actor.ppo_epochs": (1, math.inf),
    "actor.clip_ratio_low": (0, 1),
    "actor.clip_ratio_high": (0, math.inf),
    "actor.clip_ratio_c": (1 + 1e-9, math.inf),
    "actor.entropy_coeff": (0, math.inf),
    "trainer.log_samples_every": (0, math.inf),
    "trainer.samples_per_table": (1, math.inf),
}
