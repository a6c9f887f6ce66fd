-- Trust: the keys of the installation with their place in a rotation, and every bundle that was published.

-- name: trust.current
-- other: read
SELECT version, content_sha256, signed_bundle, to_ms(created_at) AS created_at_ms
  FROM trust_bundles ORDER BY version DESC LIMIT 1;

-- name: trust.lock
-- other: publishers take turns; readers are not held up
LOCK TABLE trust_bundles IN SHARE ROW EXCLUSIVE MODE;

-- name: trust.insert
-- other: published by JoinService
INSERT INTO trust_bundles (version, content_sha256, signed_bundle) VALUES (:version, :content_sha256, :signed_bundle);

-- name: trust.notify
-- other: a hint for the gateways
SELECT pg_notify(:channel, :payload);

-- name: trust.highest_held
-- other: read when a content is published: after a restore nodes hold newer versions than the database knows
SELECT coalesce(max(s.trust_version), 0) AS version FROM node_sessions s WHERE s.trust_version <= :believed_max::bigint;

-- name: trust.keys
-- other: read; a handful of rows
SELECT purpose, key_sha256, public_der, companion_der, stage, first_version, to_ms(changed_at) AS changed_at_ms
  FROM trust_keys ORDER BY purpose, changed_at, key_sha256;

-- name: trust.key_in_use
-- other: read by whoever is about to sign
SELECT key_sha256 FROM trust_keys WHERE purpose = :purpose AND stage = 'current';

-- name: trust.put_key
-- other: a key is new, or has moved on; under trust.lock
INSERT INTO trust_keys AS k (purpose, key_sha256, public_der, companion_der, stage, first_version, changed_by)
VALUES (:purpose, :key_sha256, :public_der, :companion_der, :stage, :first_version, :changed_by)
ON CONFLICT (purpose, key_sha256) DO UPDATE
SET stage = excluded.stage, changed_at = compute_now(), changed_by = excluded.changed_by;

-- name: trust.listed_since
-- other: the keys that the bundle of this version lists for the first time
UPDATE trust_keys SET first_version = :version
 WHERE first_version = 0 AND stage <> 'retired' AND purpose = ANY (:purposes::text[]);

-- name: trust.connected_behind
-- other: an operator's step: the connected nodes that do not hold a version, and how many there are; or which of those
-- that are excepted do not
SELECT s.node_id AS name, count(*) OVER () AS total FROM node_sessions s
 WHERE s.gateway_id IS NOT NULL AND s.trust_version < :version::bigint
   AND (s.node_id = ANY (:excepted::text[])) = :of_excepted::boolean
 ORDER BY s.node_id LIMIT :named_max;

-- name: trust.returning_behind
-- other: an operator's step: nodes that may come back by their certificate and do not hold a version
SELECT s.node_id AS name, count(*) OVER () AS total FROM node_sessions s
 WHERE s.trust_version < :version::bigint
   AND (s.node_id = ANY (:excepted::text[])) = :of_excepted::boolean AND EXISTS (
   SELECT FROM node_certs c WHERE c.node_id = s.node_id AND c.revoked_at IS NULL AND c.superseded_at IS NULL
     AND c.not_after > compute_now() - ms(:grace_ms::bigint))
 ORDER BY s.node_id LIMIT :named_max;

-- name: trust.issued_before
-- other: an operator's step: nodes whose certificate was issued before a moment and may still be used, and those that are
-- connected by one that is not on record, as after a restore: it goes there when they renew
SELECT old.node_id AS name, count(*) OVER () AS total FROM (
  SELECT c.node_id FROM node_certs c
   WHERE c.revoked_at IS NULL AND c.superseded_at IS NULL AND c.issued_at < at_ms(:moment_ms::bigint)
     AND c.not_after > compute_now() - ms(:grace_ms::bigint)
  UNION
  SELECT s.node_id FROM node_sessions s
   WHERE s.gateway_id IS NOT NULL AND NOT EXISTS (SELECT FROM node_certs c WHERE c.serial = s.cert_serial)) old
 WHERE (old.node_id = ANY (:excepted::text[])) = :of_excepted::boolean
 ORDER BY old.node_id LIMIT :named_max;

-- name: trust.gateways_serving_under
-- other: an operator's step: live gateways whose certificate is of one of these serving CAs; a handful of rows
SELECT l.name, count(*) OVER () AS total FROM leases l
 WHERE l.retired_at IS NULL AND l.expires_at > compute_now() AND l.serving_ca_sha256 = ANY (:keys::text[])
 ORDER BY l.name LIMIT :named_max;

-- name: trust.gateways_without_node_ca
-- other: an operator's step: live gateways that have said which node CAs they believe, and not this one; a handful of rows
SELECT l.name, count(*) OVER () AS total FROM leases l
 WHERE l.retired_at IS NULL AND l.expires_at > compute_now() AND NOT :key = ANY (l.node_cas_sha256)
 ORDER BY l.name LIMIT :named_max;

-- name: trust.tokens_before
-- other: an operator's step: join tokens that are good and were made before a version was published, or before a moment
SELECT t.token_id AS name, count(*) OVER () AS total FROM join_tokens t
 WHERE t.used_at IS NULL AND t.revoked_at IS NULL AND t.expires_at > compute_now()
   AND t.created_at < coalesce((SELECT b.created_at FROM trust_bundles b WHERE b.version = :version::bigint),
                               at_ms(:moment_ms::bigint))
 ORDER BY t.token_id LIMIT :named_max;

-- name: trust.signed_under
-- other: an operator's step: what has not ended and is signed under these roots
SELECT (SELECT count(*) FROM commands c WHERE c.signed_under = ANY (:keys::text[]) AND c.state IN (1, 2, 3, 4))
         AS open_commands,
       (SELECT count(*) FROM nodes n WHERE n.spec_signed_under = ANY (:keys::text[])) AS specs;

-- name: trust.specs_signed_under
-- other: what the node_spec controller signs anew while a root is being replaced
SELECT n.node_id FROM nodes n
 WHERE n.spec_signed_under = ANY (:keys::text[]) AND n.node_id > :after
 ORDER BY n.node_id LIMIT :page_size;

-- name: trust.holders
-- other: an operator's overview, counted over all nodes: how many hold which version
SELECT s.trust_version, count(*) FILTER (WHERE s.gateway_id IS NOT NULL) AS connected, count(*) AS nodes
  FROM node_sessions s GROUP BY s.trust_version ORDER BY s.trust_version DESC LIMIT :versions_max;

-- name: trust.nodes
-- other: read by people, by node id
SELECT s.node_id, s.trust_version, s.gateway_id IS NOT NULL AS connected, s.approver_set_epoch, s.approver_set_sha256
  FROM node_sessions s
 WHERE s.node_id > :after AND (:behind_only::boolean IS NOT TRUE OR s.trust_version < :version::bigint)
 ORDER BY s.node_id LIMIT :page_size;
