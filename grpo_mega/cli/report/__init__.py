"""The page of a run, its picture, and the live page. A client: it reads the files in RUN_DIR."""
