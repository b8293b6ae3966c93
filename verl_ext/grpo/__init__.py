"""Group-relative policy optimization: groups, advantages, loss, rollouts and rewards, whatever an action is."""
