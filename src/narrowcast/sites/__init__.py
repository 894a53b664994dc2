"""Where in the user's program a call is made: module path, functions, file and line; and warnings that say it there."""
