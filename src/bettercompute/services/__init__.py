"""What a gateway may ask of the control plane: joining, trust, secrets."""
