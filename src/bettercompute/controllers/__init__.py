"""Level-triggered reconcilers of the worker role."""
