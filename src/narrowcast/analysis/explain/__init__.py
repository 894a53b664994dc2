"""`explain`: a model is run without leaving a trace in it, and what happened is reported, for every front end."""
