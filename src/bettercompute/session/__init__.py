"""The session rules, both ends of a rule in one file. Pure."""
