"""The trainers: verl's FSDPSFTTrainer with the loop that every stage shares, and one subclass per stage."""
