-- When controllers last ran.

-- name: controller_runs.record
-- other: a controller's own row
INSERT INTO controller_runs (name, holder, ran_at, grace_until)
VALUES (:name, :holder, compute_now(), at_ms(:grace_until_ms))
ON CONFLICT (name) DO UPDATE
  SET holder = excluded.holder, ran_at = excluded.ran_at, grace_until = excluded.grace_until;

-- name: controller_runs.get
-- other: read
SELECT name, holder, to_ms(ran_at) AS ran_at_ms, to_ms(grace_until) AS grace_until_ms, to_ms(compute_now()) AS now_ms
  FROM controller_runs WHERE name = :name;

-- name: controller_runs.now
-- other: read; the clock of record
SELECT to_ms(compute_now()) AS now_ms;
