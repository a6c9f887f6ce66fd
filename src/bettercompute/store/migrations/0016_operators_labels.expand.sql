-- Operators' labels say who may command a node and which nodes a run chooses. A gateway's role writes labels, too, of what
-- a node can do; those of operators it must not touch.
CREATE FUNCTION operators_alone() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF EXISTS (SELECT FROM pg_roles g, pg_roles me
              WHERE g.rolname = 'better_compute_gateway' AND me.rolname = current_user AND NOT me.rolsuper
                AND pg_has_role(me.oid, g.oid, 'USAGE')) THEN
    RAISE EXCEPTION 'operators'' rows of % are not a gateway''s', TG_TABLE_NAME USING ERRCODE = 'insufficient_privilege';
  END IF;
  RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
END $$;
CREATE TRIGGER node_labels_set BEFORE INSERT OR UPDATE ON node_labels FOR EACH ROW
  WHEN (NEW.source <> 'system') EXECUTE FUNCTION operators_alone();
CREATE TRIGGER node_labels_removed BEFORE UPDATE OR DELETE ON node_labels FOR EACH ROW
  WHEN (OLD.source <> 'system') EXECUTE FUNCTION operators_alone();
