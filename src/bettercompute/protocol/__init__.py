"""The protocol: frames, kinds, signing inputs, statuses, versions. Pure."""
