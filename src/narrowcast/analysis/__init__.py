"""What is said about a model: a room for each public verb, named after it."""
