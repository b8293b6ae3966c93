"""Post-training on verl 0.7.0 for machines that can vanish: SFT, GRPO and a budget controller on one loop."""

from verl_ext.compat import prepare_for_verl
from verl_ext.console import restrict_transformers_bars
from verl_ext.processes import begin_quietly

begin_quietly()
prepare_for_verl()
restrict_transformers_bars()
