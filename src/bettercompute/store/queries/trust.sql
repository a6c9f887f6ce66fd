-- Trust bundles: every version that was published.

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
