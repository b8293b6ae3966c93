"""Post-training on verl 0.7.0 for preemptible machines: SFT, GRPO and a budget controller with a common loop."""

from verl_ext.compat import repair_imports
from verl_ext.processes import suppress_startup_tracebacks

suppress_startup_tracebacks()
repair_imports()
