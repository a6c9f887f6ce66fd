"""The simulator: the production gateway, controllers and daemon on virtual time, with seeded faults.

See docs/simulator.md.
"""
