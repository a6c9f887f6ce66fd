"""Identities, certificates, signatures, sealed tokens, trust. Pure, but for `keyfiles`."""
