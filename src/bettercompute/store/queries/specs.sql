-- Desired state: what is published for a node, and what was.

-- name: specs.lock
-- other: the node's row is locked, so that generations are published one after the other
SELECT n.node_id, n.spec_generation, n.observed_generation, n.applied_generation, n.spec_body,
  to_ms(compute_now()) AS now_ms
FROM nodes n WHERE n.node_id = :node_id
FOR NO KEY UPDATE OF n;

-- name: specs.publish
-- other: under the lock of specs.lock
WITH newest AS (
  UPDATE nodes n
  SET spec_generation = :generation, spec_body = :body, spec_sha256 = :spec_sha256, spec_signature = :signature,
    spec_signed_under = :signed_under, spec_updated_at = compute_now()
  WHERE n.node_id = :node_id
)
INSERT INTO node_specs (node_id, generation, body, spec_sha256, signature, patch_base, patch_body, patch_signature,
  changed, issued_at, issued_by, why)
VALUES (:node_id, :generation, :body, :spec_sha256, :signature, :patch_base, :patch_body, :patch_signature,
  :changed::text[], at_ms(:issued_at_ms::bigint), :issued_by, :why);

-- name: specs.forget_old
-- other: in the transaction that publishes; the newest generations are kept
DELETE FROM node_specs s
WHERE s.node_id = :node_id AND s.generation < (
  SELECT min(k.generation) FROM (
    SELECT generation FROM node_specs WHERE node_id = :node_id ORDER BY generation DESC LIMIT :kept::int) k);

-- name: specs.newest
-- other: read by people
SELECT n.node_id, n.spec_generation, n.observed_generation, n.applied_generation, n.spec_body, n.spec_sha256,
  n.spec_signature IS NOT NULL AS signed, to_ms(coalesce(s.issued_at, n.spec_updated_at)) AS issued_at_ms,
  coalesce(s.issued_by, '') AS issued_by, coalesce(s.why, '') AS why, t.report, to_ms(t.received_at) AS reported_at_ms
FROM nodes n
LEFT JOIN node_specs s ON s.node_id = n.node_id AND s.generation = n.spec_generation
-- Not by n.node_id, whose collation is another one: then the index of node_status is of no use.
LEFT JOIN node_status t ON t.node_id = :node_id
WHERE n.node_id = :node_id;

-- name: specs.generation
-- other: read by people
SELECT s.generation, s.body, s.spec_sha256, s.signature IS NOT NULL AS signed, s.patch_base, s.changed,
  octet_length(s.body) AS body_bytes, to_ms(s.issued_at) AS issued_at_ms, s.issued_by, s.why
FROM node_specs s WHERE s.node_id = :node_id AND s.generation = :generation;

-- name: specs.history
-- other: read by people, newest first
SELECT s.generation, s.spec_sha256, s.signature IS NOT NULL AS signed, s.patch_base, s.changed,
  octet_length(s.body) AS body_bytes, to_ms(s.issued_at) AS issued_at_ms, s.issued_by, s.why
FROM node_specs s WHERE s.node_id = :node_id AND s.generation < :before::bigint
ORDER BY s.generation DESC
LIMIT :page_size;

-- name: specs.overtaken
-- other: what the node_spec controller looks for
SELECT n.node_id FROM nodes n
WHERE n.spec_generation > 0 AND (n.observed_generation > n.spec_generation OR n.applied_generation > n.spec_generation)
  AND n.node_id > :after
ORDER BY n.node_id
LIMIT :page_size;
