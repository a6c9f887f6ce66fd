"""Delivery: commands, lanes, cancel, desired state, events, inventory and what the journal may forget.

Pure, both ends.
"""
