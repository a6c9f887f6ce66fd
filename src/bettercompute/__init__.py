"""better-compute: a control plane for fleets of nodes, and `bcd`, the daemon that every node runs."""

__version__ = "0.1.0.dev0"
