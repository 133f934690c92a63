"""The page of a run, and the live page. A client: it reads the files in RUN_DIR."""
