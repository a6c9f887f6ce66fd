-- Tokens of the HTTP API, known by their SHA-256.

-- name: api_tokens.insert
-- other: made by an administrator, or by `dev` for its own user
INSERT INTO api_tokens (token_id, name, sha256, role, label_scope, created_by, expires_at)
VALUES (:token_id, :name, :sha256, :role, :label_scope::text::jsonb, :created_by, compute_now() + ms(:lifetime_ms))
ON CONFLICT (name) DO NOTHING
RETURNING token_id;

-- name: api_tokens.find
-- other: read at each request
SELECT token_id, name, role, label_scope::text AS label_scope, to_ms(created_at) AS created_at_ms, created_by,
       to_ms(expires_at) AS expires_at_ms, to_ms(revoked_at) AS revoked_at_ms
  FROM api_tokens
 WHERE sha256 = :sha256 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > compute_now());

-- name: api_tokens.list
-- other: read
SELECT token_id, name, role, label_scope::text AS label_scope, to_ms(created_at) AS created_at_ms, created_by,
       to_ms(expires_at) AS expires_at_ms, to_ms(revoked_at) AS revoked_at_ms
  FROM api_tokens ORDER BY name;

-- name: api_tokens.revoke
-- other: asked by an administrator
UPDATE api_tokens SET revoked_at = compute_now() WHERE name = :name AND revoked_at IS NULL RETURNING token_id;
