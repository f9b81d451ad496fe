"""hitproof.replay."""
