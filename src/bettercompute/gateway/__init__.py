"""The gateway: the shell that owns the nodes' streams."""
