"""What a user reads, without torch: results, the documents made of them, and what renders these."""
