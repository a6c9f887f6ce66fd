-- What a gateway says of its certificates when it renews its lease, so that no CA is switched or retired under it: by which
-- serving CA its own certificate is, and which node CAs it believes. NULL: it has not said, or is of a release before.
ALTER TABLE leases
  ADD COLUMN serving_ca_sha256 text COLLATE "C",
  ADD COLUMN node_cas_sha256 text[] COLLATE "C";
