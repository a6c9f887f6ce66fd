"""What tests, demos and simulations of others need; ships with the package."""
