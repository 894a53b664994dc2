"""The scale of a loss as data: its history, why a step was skipped, when a run is stuck."""
