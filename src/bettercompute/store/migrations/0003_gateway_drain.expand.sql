-- An operator asks a gateway to give its sessions away. The gateway reads it whenever it renews its lease; `draining`
-- stays the gateway's own word.
ALTER TABLE leases
  ADD COLUMN drain_requested_at timestamptz,
  ADD COLUMN drain_requested_by text COLLATE "C";
