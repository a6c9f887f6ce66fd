-- What is said of a certificate is said for good: a gateway's role may revoke one and supersede one, because it must when
-- clones or a younger one show up, and neither it nor anybody may take that back. A node leaves its quarantine only by
-- the next generation of its identity. Refused as a missing privilege is.
CREATE FUNCTION marks_stay() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'what was said of % stays', TG_TABLE_NAME USING ERRCODE = 'insufficient_privilege';
END $$;
CREATE TRIGGER node_certs_marks_stay BEFORE UPDATE ON node_certs FOR EACH ROW
  WHEN (OLD.revoked_at IS NOT NULL AND (NEW.revoked_at IS NULL OR NEW.revocation_reason <> OLD.revocation_reason)
        OR OLD.superseded_at IS NOT NULL AND NEW.superseded_at IS NULL
        OR OLD.first_used_at IS NOT NULL AND NEW.first_used_at IS NULL)
  EXECUTE FUNCTION marks_stay();
CREATE TRIGGER nodes_marks_stay BEFORE UPDATE ON nodes FOR EACH ROW
  WHEN (OLD.quarantined_at IS NOT NULL AND NEW.quarantined_at IS NULL
        AND NEW.identity_generation = OLD.identity_generation)
  EXECUTE FUNCTION marks_stay();
