"""Post-training on verl 0.7.0 for machines that can vanish: SFT, GRPO and a budget controller on one loop."""
