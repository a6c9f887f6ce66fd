-- Conditions of nodes.

-- name: conditions.set
-- other: judged by whoever owns the condition; an unchanged one keeps its time
INSERT INTO node_conditions (node_id, type, source, status, reason, message)
SELECT v.node_id, v.type, v.source, v.status, v.reason, v.message
  FROM unnest(:node_ids::text[], :types::text[], :sources::text[], :statuses::text[], :reasons::text[],
              :messages::text[]) AS v (node_id, type, source, status, reason, message)
  JOIN nodes n ON n.node_id = v.node_id
 ORDER BY v.node_id, v.type
ON CONFLICT (node_id, type) DO UPDATE
  SET source = excluded.source, status = excluded.status, reason = excluded.reason, message = excluded.message,
      updated_at = compute_now(),
      changed_at = CASE WHEN node_conditions.status = excluded.status THEN node_conditions.changed_at
                        ELSE compute_now() END;

-- name: conditions.of_node
-- other: read
SELECT node_id, type, source, status, reason, message, to_ms(changed_at) AS changed_at_ms,
       to_ms(updated_at) AS updated_at_ms
  FROM node_conditions WHERE node_id = :node_id ORDER BY type;
