-- Which of PostgreSQL's timelines this database is on: another one after a standby was promoted or a backup restored,
-- each of which may lack what was committed last. Empty where the server does not tell.
CREATE FUNCTION database_timeline() RETURNS text LANGUAGE plpgsql STABLE AS $$
BEGIN
  RETURN substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8);
EXCEPTION WHEN feature_not_supported OR undefined_function OR insufficient_privilege THEN
  RETURN '';
END $$;
