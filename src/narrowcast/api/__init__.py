"""What users call, above the front ends: compile, export, script and their backends, each in one file."""
