-- Join tokens: each is used once.

-- name: tokens.insert
-- other: made by an operator
INSERT INTO join_tokens (token_id, secret_sha256, site, role, tenant_controlled, node_id, allowed_kinds, expires_at,
                         created_by, attestor, machine)
VALUES (:token_id, :secret_sha256, :site, :role, :tenant_controlled, :node_id, :allowed_kinds::text[],
        compute_now() + ms(:lifetime_ms), :created_by, :attestor, :machine::text::jsonb)
RETURNING to_ms(expires_at) AS expires_at_ms;

-- name: tokens.redeem
-- other: the one statement that decides who uses a token, before any effect
UPDATE join_tokens
   SET used_at = compute_now(), used_csr_sha256 = :csr_sha256, used_node_id = coalesce(node_id, :node_id),
       used_source = :source
 WHERE secret_sha256 = :secret_sha256 AND used_at IS NULL AND revoked_at IS NULL AND expires_at > compute_now()
   AND role = :role AND attestor = :attestor
   AND (:asked_node_id::text IS NULL OR node_id IS NULL OR node_id = :asked_node_id)
RETURNING token_id, site, role, tenant_controlled, allowed_kinds, used_node_id;

-- name: tokens.find_by_secret
-- other: read, to say why a token was not redeemed
SELECT token_id, site, role, tenant_controlled, node_id, allowed_kinds, used_csr_sha256, used_node_id,
       to_ms(expires_at) AS expires_at_ms, to_ms(used_at) AS used_at_ms, to_ms(revoked_at) AS revoked_at_ms,
       expires_at <= compute_now() AS expired, attestor, machine::text AS machine
  FROM join_tokens WHERE secret_sha256 = :secret_sha256;

-- name: tokens.list
-- other: read, newest first
SELECT token_id, site, role, tenant_controlled, node_id, allowed_kinds, to_ms(expires_at) AS expires_at_ms,
       to_ms(created_at) AS created_at_ms, created_by, to_ms(used_at) AS used_at_ms, used_node_id, used_source,
       to_ms(revoked_at) AS revoked_at_ms, revoked_by, expires_at <= compute_now() AS expired, attestor
  FROM join_tokens
 WHERE token_id < :before
 ORDER BY token_id DESC
 LIMIT :page_size;

-- name: tokens.revoke
-- other: asked by an operator
UPDATE join_tokens SET revoked_at = compute_now(), revoked_by = :revoked_by
 WHERE token_id = :token_id AND revoked_at IS NULL AND used_at IS NULL
RETURNING token_id;

-- name: tokens.get
-- other: read
SELECT token_id, site, role, tenant_controlled, node_id, allowed_kinds, to_ms(expires_at) AS expires_at_ms,
       to_ms(created_at) AS created_at_ms, created_by, to_ms(used_at) AS used_at_ms, used_node_id, used_source,
       to_ms(revoked_at) AS revoked_at_ms, revoked_by, expires_at <= compute_now() AS expired, attestor
  FROM join_tokens WHERE token_id = :token_id;
