"""hitproof.cli."""
