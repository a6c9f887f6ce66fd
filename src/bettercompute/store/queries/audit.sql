-- Who did what, to what, why, and how it ended.

-- name: audit.insert
-- other: in the transaction of the act where there is one
INSERT INTO audit_log (id, actor, action, target, why, outcome, details)
VALUES (:id, :actor, :action, :target, :why, :outcome, :details::text::jsonb);

-- name: audit.list
-- other: read, newest first
SELECT id, to_ms(at) AS at_ms, actor, action, target, why, outcome, details::text AS details
  FROM audit_log
 WHERE id < :before AND (:actor::text IS NULL OR actor = :actor) AND (:action::text IS NULL OR action = :action)
 ORDER BY id DESC
 LIMIT :page_size;

-- name: audit.list_of_target
-- other: read, newest first
SELECT id, to_ms(at) AS at_ms, actor, action, target, why, outcome, details::text AS details
  FROM audit_log
 WHERE target = :target AND id < :before
 ORDER BY id DESC
 LIMIT :page_size;
