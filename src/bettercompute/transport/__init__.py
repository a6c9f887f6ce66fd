"""Bytes to frames and back: gRPC over HTTP/2 with TLS, and a pair of streams in memory. No policy."""
