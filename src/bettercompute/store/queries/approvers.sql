-- Approvers: the sets and their signatures, and the batches that wait for approvals.

-- name: approvers.sets
-- other: read by people and by whoever changes the set; newest first, withdrawn ones left out
SELECT epoch, approver_keys, threshold, tiers, unbatched_per_hour, names::text AS names, signatures, state,
       to_ms(proposed_at) AS proposed_at_ms, proposed_by, why, to_ms(decided_at) AS decided_at_ms
  FROM approver_sets WHERE state <> 'withdrawn' ORDER BY epoch DESC LIMIT :sets_max;

-- name: approvers.set_in_state
-- other: read; there is one at most that is current, and one that is proposed
SELECT epoch, approver_keys, threshold, tiers, unbatched_per_hour, names::text AS names, signatures, state,
       to_ms(proposed_at) AS proposed_at_ms, proposed_by, why, to_ms(decided_at) AS decided_at_ms
  FROM approver_sets WHERE state = :state;

-- name: approvers.highest_epoch
-- other: read when a set is proposed: after a restore nodes enforce newer sets than the database knows
SELECT greatest((SELECT coalesce(max(epoch), 0) FROM approver_sets),
                (SELECT coalesce(max(approver_set_epoch), 0) FROM node_sessions
                  WHERE approver_set_epoch <= :believed_max::bigint)) AS epoch;

-- name: approvers.propose
-- other: under the trust lock
INSERT INTO approver_sets (epoch, approver_keys, threshold, tiers, unbatched_per_hour, names, state, proposed_by, why)
VALUES (:epoch, :approver_keys::bytea[], :threshold, :tiers::integer[], :unbatched_per_hour, :names::jsonb, 'proposed',
        :proposed_by, :why);

-- name: approvers.sign
-- other: under the trust lock
UPDATE approver_sets SET signatures = signatures || :signature::bytea WHERE epoch = :epoch;

-- name: approvers.replace
-- other: under the trust lock; the set in force makes room
UPDATE approver_sets SET state = 'replaced' WHERE state = 'current';

-- name: approvers.decide
-- other: under the trust lock
UPDATE approver_sets SET state = :state, decided_at = compute_now() WHERE epoch = :epoch AND state = 'proposed';

-- name: approvers.insert_batch
-- other: in the transaction that enqueues its commands
INSERT INTO approval_batches (batch_id, kind, scope_root, scope_size, not_after, trust_domain, asked_by, stepwise)
VALUES (:batch_id, :kind, :scope_root, :scope_size, at_ms(:not_after_ms::bigint), :trust_domain, :asked_by, :stepwise);

-- name: approvers.batch
-- other: read
SELECT batch_id, kind, scope_root, scope_size, to_ms(not_after) AS not_after_ms, trust_domain, state, asked_by,
       to_ms(asked_at) AS asked_at_ms, signatures, to_ms(decided_at) AS decided_at_ms, decided_by, why,
       stepwise, to_ms(compute_now()) AS now_ms
  FROM approval_batches WHERE batch_id = :batch_id;

-- name: approvers.lock_batch
-- other: approvals of one batch take turns
SELECT batch_id FROM approval_batches WHERE batch_id = :batch_id FOR UPDATE;

-- name: approvers.waiting_batches
-- other: read by people; what waits for approvals and has not expired, the soonest to expire first
SELECT batch_id, kind, scope_root, scope_size, to_ms(not_after) AS not_after_ms, trust_domain, state, asked_by,
       to_ms(asked_at) AS asked_at_ms, signatures, to_ms(decided_at) AS decided_at_ms, decided_by, why,
       stepwise, to_ms(compute_now()) AS now_ms
  FROM approval_batches WHERE state = 'waiting' AND not_after > compute_now()
 ORDER BY not_after LIMIT :batches_max;

-- name: approvers.sign_batch
-- other: under approvers.lock_batch
UPDATE approval_batches SET signatures = :signatures::bytea[] WHERE batch_id = :batch_id;

-- name: approvers.decide_batch
-- other: under approvers.lock_batch
UPDATE approval_batches SET state = :state, decided_at = compute_now(), decided_by = :decided_by, why = :why
 WHERE batch_id = :batch_id;

-- name: approvers.release
-- other: an approved batch's commands may be sent from now on; those of a run in steps wait for theirs
WITH locked AS MATERIALIZED (
  SELECT c.id FROM commands c WHERE c.batch_id = :batch_id AND c.state = 1 ORDER BY c.id FOR NO KEY UPDATE OF c)
UPDATE commands c SET batch_approval = :batch_approval,
       not_before = CASE WHEN :stepwise::boolean THEN c.not_before ELSE c.asked_not_before END
  FROM locked WHERE c.id = locked.id
RETURNING c.node_id;

-- name: approvers.release_step
-- other: the next commands of an approved run in steps may be sent; asked again, those that were are left as they are
WITH locked AS MATERIALIZED (
  SELECT c.id FROM commands c
   WHERE c.batch_id = :batch_id AND c.id = ANY (:command_ids::text[]) AND c.state = 1 AND c.not_before = c.not_after
   ORDER BY c.id FOR NO KEY UPDATE OF c)
UPDATE commands c SET not_before = c.asked_not_before FROM locked WHERE c.id = locked.id
RETURNING c.node_id;

-- name: approvers.not_of_batch
-- other: what a step names and the batch has not
SELECT asked.id AS command_id FROM unnest(:command_ids::text[]) AS asked (id)
 WHERE NOT EXISTS (SELECT FROM commands c WHERE c.id = asked.id AND c.batch_id = :batch_id)
 ORDER BY asked.id LIMIT :named_max;

-- name: approvers.held_commands
-- other: a run in steps is stopped: what of it was not released ends
SELECT id AS command_id FROM commands WHERE batch_id = :batch_id AND state = 1 AND not_before = not_after ORDER BY id;

-- name: approvers.open_commands
-- other: an operator refuses a batch: what of it is pending ends
SELECT id AS command_id FROM commands WHERE batch_id = :batch_id AND state = 1 ORDER BY id;

-- name: approvers.scope
-- other: read by an approver, who computes the scope root anew from it; in the order of the leaves
SELECT id AS command_id, node_id, kind, body FROM commands WHERE batch_id = :batch_id AND id > :after
 ORDER BY id LIMIT :page_size;
