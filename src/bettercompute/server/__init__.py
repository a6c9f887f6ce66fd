"""The composition root of the control plane."""
