-- The generations of each node's desired state: the bytes as they were published and signed, and who asked for them.
-- The newest one also stands in `nodes`, which is what gateways compare with.
CREATE TABLE node_specs (
  node_id          text COLLATE "C" NOT NULL REFERENCES nodes ON DELETE CASCADE,
  generation       bigint NOT NULL CHECK (generation > 0),
  body             bytea NOT NULL CHECK (octet_length(body) <= 4194304),
  spec_sha256      bytea NOT NULL CHECK (octet_length(spec_sha256) = 32),
  signature        bytea,
  -- One section over the generation before, where exactly one differs.
  patch_base       bigint CHECK (patch_base < generation),
  patch_body       bytea CHECK (octet_length(patch_body) <= 4194304),
  patch_signature  bytea,
  changed          text[] NOT NULL,
  issued_at        timestamptz NOT NULL DEFAULT compute_now(),
  issued_by        text COLLATE "C" NOT NULL,
  why              text COLLATE "C" NOT NULL DEFAULT '',
  PRIMARY KEY (node_id, generation),
  CHECK ((patch_base IS NULL) = (patch_body IS NULL))
);

-- Nodes whose daemon knows a higher generation than the database, which was restored: almost always none.
CREATE INDEX nodes_spec_overtaken ON nodes (node_id)
  WHERE spec_generation > 0 AND (observed_generation > spec_generation OR applied_generation > spec_generation);
