-- What of a node's word its own key has signed, and what the control plane found when it verified that.

ALTER TABLE commands
  ADD COLUMN attestation text COLLATE "C" NOT NULL DEFAULT 'none'
    CHECK (attestation IN ('none', 'expected', 'verified', 'unsigned', 'forged')),
  ADD COLUMN attestation_reason text COLLATE "C" NOT NULL DEFAULT '';
CREATE INDEX commands_unattested ON commands (id) WHERE attestation = 'expected' AND state >= 5;

ALTER TABLE node_status
  ADD COLUMN attestation text COLLATE "C" NOT NULL DEFAULT 'none'
    CHECK (attestation IN ('none', 'verified', 'unsigned', 'forged')),
  ADD COLUMN attestation_reason text COLLATE "C" NOT NULL DEFAULT '',
  -- The report that was looked at last; a newer one waits.
  ADD COLUMN judged_at timestamptz,
  -- The newest statement that verified, and its own time.
  ADD COLUMN attested_body bytea,
  ADD COLUMN attested_at timestamptz;
CREATE INDEX node_status_unjudged ON node_status (node_id) WHERE judged_at IS DISTINCT FROM received_at;
