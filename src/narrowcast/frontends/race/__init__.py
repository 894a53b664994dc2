"""Which formats are fastest here: candidates are made, timed side by side, and what won is remembered."""
