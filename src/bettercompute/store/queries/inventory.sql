-- Inventory: what daemons report of their hosts, and what they say they would report.

-- name: inventory.store_sections
-- fact
INSERT INTO inventory_sections (node_id, section, sha256, body, collected_at, received_at)
SELECT v.node_id, v.section, v.sha256, v.body, at_ms(v.collected_at_ms), compute_now()
  FROM unnest(:node_ids::text[], :sections::text[], :hashes::bytea[], :bodies::bytea[], :collected_ats_ms::bigint[])
       AS v (node_id, section, sha256, body, collected_at_ms)
  JOIN nodes n ON n.node_id = v.node_id
 ORDER BY v.node_id, v.section
ON CONFLICT (node_id, section) DO UPDATE
  SET sha256 = excluded.sha256, body = excluded.body, collected_at = excluded.collected_at,
      received_at = excluded.received_at;

-- name: inventory.record_hashes
-- fact
INSERT INTO inventory_hashes (node_id, section, sha256, reported_at)
SELECT v.node_id, v.section, v.sha256, compute_now()
  FROM unnest(:node_ids::text[], :sections::text[], :hashes::bytea[]) AS v (node_id, section, sha256)
  JOIN nodes n ON n.node_id = v.node_id
 ORDER BY v.node_id, v.section
ON CONFLICT (node_id, section) DO UPDATE SET sha256 = excluded.sha256, reported_at = excluded.reported_at
  WHERE inventory_hashes.sha256 <> excluded.sha256;

-- name: inventory.forget_hashes
-- fact
WITH locked AS (
  SELECT section FROM inventory_hashes
   WHERE node_id = :node_id AND section <> ALL (:sections::text[])
   ORDER BY section FOR UPDATE)
DELETE FROM inventory_hashes h USING locked WHERE h.node_id = :node_id AND h.section = locked.section;

-- name: inventory.stored_hashes
-- other: read by Hello
SELECT section, sha256 FROM inventory_sections WHERE node_id = :node_id ORDER BY section;

-- name: inventory.read
-- other: read
SELECT s.node_id, s.section, s.sha256, s.body, to_ms(s.collected_at) AS collected_at_ms,
       to_ms(s.received_at) AS received_at_ms, h.sha256 IS NOT DISTINCT FROM s.sha256 AS agrees
  FROM inventory_sections s
  LEFT JOIN inventory_hashes h ON h.node_id = s.node_id AND h.section = s.section
 WHERE s.node_id = ANY (:node_ids::text[]) AND (:sections::text[] IS NULL OR s.section = ANY (:sections))
 ORDER BY s.node_id, s.section;

-- name: inventory.disagreeing
-- other: read; sections that were reported and not yet stored as reported
SELECT h.section FROM inventory_hashes h
  LEFT JOIN inventory_sections s ON s.node_id = h.node_id AND s.section = h.section
 WHERE h.node_id = :node_id AND s.sha256 IS DISTINCT FROM h.sha256
 ORDER BY h.section;
