"""What the machine is made of, in sections with stable hashes, and what of it changes by itself, as load and pressure.

One module per section; `collection.collect_all` runs them, `canonical` gives each its bytes and its hash,
`host.HostRoot` is the machine they read. The whole is described in docs/inventory.md.
"""
