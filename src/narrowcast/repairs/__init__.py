"""The search for the rules that repair a policy: which are tried, how few suffice, how often the model may run."""
