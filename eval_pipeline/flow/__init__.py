"""What the commands have in common: the jobs of one place, from their entry to their published figures."""
