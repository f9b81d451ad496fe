"""hitproof.properties."""
