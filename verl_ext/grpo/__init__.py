"""Group-relative policy optimisation: groups, advantages, loss, rollouts and rewards, whatever an action is."""
