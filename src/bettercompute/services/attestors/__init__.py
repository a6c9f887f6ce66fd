"""How a node that asks to join is believed: one file per attestor, all behind `port.Attestor`."""
