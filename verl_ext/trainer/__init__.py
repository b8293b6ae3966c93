"""Trainers: verl's FSDPSFTTrainer with a loop that all stages share, and one subclass per stage."""
