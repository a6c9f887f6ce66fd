"""bcd, the node daemon."""
