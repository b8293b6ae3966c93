"""Post-training on verl 0.7.0 for preemptible machines: SFT, GRPO and a budget controller with a common loop."""

from verl_ext.compat import repair_imports
from verl_ext.processes import begin_quietly

begin_quietly()
repair_imports()
