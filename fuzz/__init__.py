"""hitproof.fuzz."""
