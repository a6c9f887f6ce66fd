"""The two commands: `better-compute` and `bcd`."""
