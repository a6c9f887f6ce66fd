"""Commands, lanes, desired state, events, inventory: what is delivered and when. Pure."""
